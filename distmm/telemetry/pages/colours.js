// Dask's dashboard has a light theme only. Bokeh draws the grid of C on a canvas, which style sheets do not reach. So this
// script sets its colours, by the browser's preference or by ?theme=dark in the address (for JupyterLab's theme).
const asked = new URLSearchParams(location.search).get("theme");
const prefers = matchMedia("(prefers-color-scheme: dark)");
const sheet = document.head.appendChild(document.createElement("style"));
function colour() {
  const c = (asked ?? (prefers.matches ? "dark" : "light")) == "dark" ? dark : light;
  const paint = (model, colours) => model.setv(colours, {sync: false});  // the server need not know
  paint(figure.title, {text_color: c.ink});
  paint(figure, {outline_line_color: c.line});
  for (const side of [figure.above, figure.below, figure.left, figure.right])
    for (const part of side)
      if ("axis_label_text_color" in part.properties)
        paint(part, {axis_label_text_color: c.muted, major_label_text_color: c.muted, axis_line_color: c.line,
                     major_tick_line_color: c.line, minor_tick_line_color: null});
  const names = Object.entries(c).map(([name, value]) => `--distmm-${name}: ${value};`).join(" ");
  sheet.textContent = `
    :root { ${names} color-scheme: ${c == dark ? "dark" : "light"}; }
    html, body { background: ${c.ground}; color: ${c.ink}; }
    body { padding-top: 0; } .navbar { position: sticky; margin: 0 -10px 8px; }  /* it may have two lines */
    .navbar ul { background-color: ${c.bar}; } .navbar li a { color: ${c.ink}; }
    .dropdown-content { background-color: ${c.bar}; }`;
}
prefers.addEventListener("change", colour);
colour();
