// A page that is no longer live says so; whoever is no longer signed in gets to sign in.
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
