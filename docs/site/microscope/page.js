"use strict";
/* What the parts of the page share: making elements, drawing, writing numbers. */

/** An element: make("p", {class: "note"}, "text", child). A function among the attributes is an event's listener. */
function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of a drawing. */
function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const byId = (id) => document.getElementById(id);

/** The options of a select: [value, text] pairs. */
function offer(select, pairs, chosen) {
  select.replaceChildren(
    ...pairs.map(([value, text]) => make("option", {value, selected: value === chosen}, text)),
  );
}

/** A number as a reader writes it: all of its digits, and a real minus sign. */
function shown(x) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  return (Object.is(x, -0) ? "-0" : String(x)).replaceAll("-", "−");
}

/** The same in at most some six digits. */
const short = (x) => (Number.isFinite(x) ? numbers.g(x).replaceAll("-", "−") : shown(x));

/** An integer power of two, with the exponent above the line. */
const power = (exponent) => make("span", {}, "2", make("sup", {}, shown(exponent)));

/** The number that a text means, or undefined: 0.1, 1e-5, 1/3, 2^-9, inf, nan. */
function parsed(text) {
  const plain = text.trim().toLowerCase().replaceAll("−", "-").replace("infinity", "inf").replace("∞", "inf");
  if (/^[+-]?nan$/.test(plain)) return NaN;
  if (/^[+-]?inf$/.test(plain)) return plain[0] === "-" ? -Infinity : Infinity;
  const raised = /^([+-]?)([\d.]+)\^\(?([+-]?\d+)\)?$/.exec(plain);
  if (raised) return (raised[1] === "-" ? -1 : 1) * Number(raised[2]) ** Number(raised[3]);
  const parts = plain.split("/");
  const found = parts.map((part) => (/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(part.trim()) ? Number(part) : NaN));
  if (parts.length > 2 || found.some(Number.isNaN)) return undefined;
  return parts.length === 2 ? found[0] / found[1] : found[0];
}

/** Call `redraw` now and whenever the width of an element changes. */
function atEachWidth(element, redraw) {
  let before = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === before || element.clientWidth === 0) return;
    before = element.clientWidth;
    redraw();
  }).observe(element);
}
