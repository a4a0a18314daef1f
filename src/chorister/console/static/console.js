// Show what is wrong at the field that it is about: the answer names it, the form has it.
(() => {
  const show = () => {
    for (const old of document.querySelectorAll(".field-error")) old.remove();
    for (const old of document.querySelectorAll("[aria-invalid]")) {
      old.removeAttribute("aria-invalid");
      old.removeAttribute("aria-describedby");
    }
    const notice = document.querySelector("#cost [data-field], #plan [data-field]");
    if (!notice || !notice.dataset.field) return;
    const field = document.getElementsByName(notice.dataset.field)[0];
    if (!field) return;
    const text = document.createElement("p");
    text.className = "field-error";
    text.id = `problem-${notice.dataset.field}`;
    text.textContent = notice.dataset.why;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-describedby", text.id);
    field.after(text);
  };
  document.addEventListener("htmx:after:swap", show);
})();

// Say so when a page is no longer live; go to the sign-in page when the session has ended.
(() => {
  const stale = (yes) => {
    const notice = document.getElementById("stale");
    if (notice) notice.hidden = !yes;
  };
  document.addEventListener("htmx:sse:error", (event) => {
    if (event.detail.status === 401) location.assign("/sign-in");
    else stale(true);
  });
  document.addEventListener("htmx:sse:after:connection", () => stale(false));
})();
