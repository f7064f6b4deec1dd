// Runs before the page is drawn, so that the chosen theme never flashes, and the view's module comes with the page's own.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch { /* storage may be closed */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  const place = new URLSearchParams(location.search), view = place.get("run") ? place.get("tab") || "overview" : place.get("view");
  if (/^(overview|metrics|config|traces|logs|report|project|compare)$/.test(view)) document.head.append(Object.assign(document.createElement("link"), { rel: "modulepreload", href: `/static/views/${view}.js` }));
})();
