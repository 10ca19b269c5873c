"use strict";
// Draws the figures, in the colours and at the width of the reader's screen.

// Okabe and Ito's colours, which differ for colour-blind people too; lighter ones on dark paper.
const COLOURS = {
  light: ["#1b1b1f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b07c00", "#7a7a7a"],
  dark: ["#ececf1", "#56b4e9", "#ff8c42", "#2dc99a", "#e58fc0", "#9bd1f5", "#f0c24b", "#a6a6b3"],
};
const DASHES = ["solid", "dash", "dashdot", "dot"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)");
const figures = JSON.parse(document.getElementById("figures").textContent);

function coloured(trace) {
  const colours = COLOURS[dark.matches ? "dark" : "light"];
  const index = trace.meta === "ink" ? 0 : trace.meta;
  const colour = colours[index % colours.length];
  const marker = { ...trace.marker, color: colour };
  if (trace.type === "bar") return { ...trace, marker };
  return { ...trace, marker, line: { color: colour, dash: DASHES[index % DASHES.length], width: 2 } };
}

function axis(given, style) {
  const lines = style.getPropertyValue("--edge");
  return { ...given, gridcolor: lines, linecolor: lines, zerolinecolor: lines, automargin: true };
}

function draw(place) {
  const { traces, layout } = figures[place.dataset.figure];
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink");
  const shapes = (layout.shapes || []).map((shape) => ({ ...shape, line: { color: ink, width: 1, dash: "dot" } }));
  const whole = {
    ...layout, shapes,
    // On a narrow screen the legend has a line for each name.
    height: (layout.height || 380) + (place.clientWidth < 500 ? 15 * traces.length : 0),
    xaxis: axis(layout.xaxis, style), yaxis: axis(layout.yaxis, style),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    hoverlabel: { namelength: -1 },
    legend: { traceorder: "normal", orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom" },
    margin: { l: 40, r: 10, t: 10, b: 40 },
    // A finger scrolls the page; it would zoom otherwise.
    dragmode: touch.matches ? false : "zoom",
  };
  const look = { responsive: true, displaylogo: false, displayModeBar: false };
  Plotly.react(place, traces.map(coloured), whole, look);
}

const places = document.querySelectorAll(".plot");
places.forEach(draw);
dark.addEventListener("change", () => places.forEach(draw));
