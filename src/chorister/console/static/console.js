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
