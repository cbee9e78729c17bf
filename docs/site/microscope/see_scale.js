"use strict";
/* Part 2: a scale of a tensor, on the number line of a format. */

{
  const {E4M3, E5M2, E2M1} = numbers;
  const COUNT = 4096;
  const SHOWN = new Map([[E4M3, [-16, 16]], [E5M2, [-24, 23]], [E2M1, [-12, 12]]]); // binades of |x · scale|
  const BINS = 2; // a binade
  const CURVE = 4; // points a binade

  /** The tensors: normal numbers of a written generator, so that they are the same in every browser. */
  const TENSORS = {
    activations: ["activations: a bell curve", () => numbers.normal(COUNT, 1)],
    outliers: [
      "activations with outliers: one in 256 is 64 times as large",
      () => numbers.normal(COUNT, 1).map((x, i) => (i % 256 === 0 ? 64 * x : x)),
    ],
    gradients: [
      "gradients: small, of many magnitudes",
      () => {
        const spread = numbers.normal(COUNT, 3);
        return numbers.normal(COUNT, 2).map((x, i) => x * 2 ** (Math.round(3 * spread[i]) - 14));
      },
    ],
    weights: ["weights: a bell curve of width 0.02", () => numbers.normal(COUNT, 4).map((x) => 0.02 * x)],
  };
  const slider = byId("log-scale");
  const state = {tensor: "activations", fmt: E4M3, log: 0, xs: TENSORS.activations[1]()};

  /** The scale that is used: 2^log in fp32, or such that 1 / scale is an E8M0 number. */
  function scaleOf(log) {
    const scale = Math.fround(2 ** log);
    if (!byId("power").checked) return scale;
    return 1 / numbers.decode(numbers.e8m0Above(Math.fround(1 / scale)), numbers.E8M0);
  }

  const percent = (part) => `${(100 * part / COUNT).toFixed(1)} %`;
  const decibels = (sqnr) => (Number.isFinite(sqnr) ? `${sqnr.toFixed(1)} dB` : "∞ dB");
  const smallest = () => numbers.decode(1, state.fmt);

  function figures(scale, stats) {
    const entry = (name, value, cls) =>
      make("div", {class: cls}, make("dt", {}, name), make("dd", {}, value));
    byId("figures").replaceChildren(
      entry("scale", short(scale), ""),
      entry("saturated", percent(stats.saturated), stats.saturated ? "bad" : ""),
      entry("underflowed", percent(stats.underflowed), stats.underflowed ? "bad" : ""),
      entry("SQNR", decibels(stats.sqnr), ""),
    );
    byId("scale-said").textContent =
      `Scale ${short(scale)}: saturated ${percent(stats.saturated)}, underflowed ${percent(stats.underflowed)}, ` +
      `SQNR ${decibels(stats.sqnr)}.`;
    slider.setAttribute("aria-valuetext", `${short(scale)}, SQNR ${decibels(stats.sqnr)}`);
  }

  function histogram(scale) {
    const box = byId("histogram");
    const [LOW, HIGH] = SHOWN.get(state.fmt);
    const [width, height, line] = [box.clientWidth, 215, 165];
    const place = (log) => ((log - LOW) / (HIGH - LOW)) * width;
    const bins = new Int32Array((HIGH - LOW) * BINS);
    for (const x of state.xs) {
      const log = Math.log2(Math.abs(x * scale));
      if (log > -Infinity) bins[Math.min(Math.max(Math.floor((log - LOW) * BINS), 0), bins.length - 1)] += 1;
    }
    const most = Math.max(...bins);
    const ends = [Math.log2(smallest() / 2), Math.log2(numbers.limit(state.fmt))];
    const bars = Array.from(bins, (count, i) => {
      const middle = LOW + (i + 0.5) / BINS;
      const cls = middle < ends[0] ? "under" : middle > ends[1] ? "over" : "fits";
      const tall = count && Math.max((count / most) * (line - 30), 2); // a few outliers must be seen
      return draw("rect", {
        x: place(LOW + i / BINS) + 0.5, y: line - tall, width: width / bins.length - 1, height: tall, class: cls,
      });
    });
    const codes = Array.from({length: state.fmt.largestCode}, (_, i) => Math.log2(numbers.decode(i + 1, state.fmt)));
    const ticks = codes.map((log) => draw("line", {x1: place(log), x2: place(log), y1: line + 6, y2: line + 22}));
    const zone = (from, to, cls, text, anchor) => [
      draw("rect", {x: place(from), y: 0, width: place(to) - place(from), height: line, class: `zone ${cls}`}),
      draw("text", {x: anchor === "end" ? place(to) - 6 : place(from) + 6, y: 14, "text-anchor": anchor}, text),
    ];
    const label = (log, text, anchor = "middle") =>
      draw("text", {x: place(log), y: line + 40, "text-anchor": anchor}, ...text);
    const tight = ends[1] - ends[0] < 8; // E2M1's two ends would write over each other
    box.replaceChildren(
      draw(
        "svg",
        {width, height, viewBox: `0 0 ${width} ${height}`, class: state.fmt.name.toLowerCase(), role: "img",
          "aria-label": "How many numbers of the tensor lie where on the format's number line"},
        ...zone(LOW, ends[0], "under", width > 500 ? "underflow: 0" : "to 0", "end"),
        ...zone(ends[1], HIGH, "over", width > 500 ? "saturated" : "to max", "start"),
        ...bars,
        draw("line", {x1: 0, x2: width, y1: line, y2: line, class: "axis"}),
        draw("g", {class: "codes"}, ...ticks),
        label(codes[0], raised(codes[0]), tight ? "end" : "middle"),
        tight ? null : label(0, ["1"]),
        label(codes.at(-1), [shown(numbers.largest(state.fmt))], tight ? "start" : "middle"),
      ),
    );
  }

  /** 2 to a power, as parts of a drawing's text. */
  const raised = (exponent) => ["2", draw("tspan", {dy: -5, class: "up"}, shown(exponent))];

  let drawn = ""; // the curve does not depend on the scale: its points are computed once
  let points = [];

  function curve() {
    const box = byId("curve");
    const [width, height, bottom] = [box.clientWidth, 140, 110];
    const [from, to] = [Number(slider.min), Number(slider.max)];
    const key = [state.tensor, state.fmt.name, byId("power").checked].join();
    if (key !== drawn) {
      const count = (to - from) * CURVE + 1;
      points = Array.from({length: count}, (_, i) => {
        const log = from + i / CURVE;
        return [log, Math.max(0, numbers.castStats(state.xs, scaleOf(log), state.fmt).sqnr)];
      });
      drawn = key;
    }
    const top = 40; // dB
    const place = (log) => ((log - from) / (to - from)) * width;
    const rise = (sqnr) => bottom - (Math.min(sqnr, top) / top) * (bottom - 20);
    const path = points.map(([log, sqnr]) => `${place(log).toFixed(1)},${rise(sqnr).toFixed(1)}`).join(" ");
    const now = Math.max(0, numbers.castStats(state.xs, scaleOf(state.log), state.fmt).sqnr);
    const rule = (sqnr) => [
      draw("line", {x1: 0, x2: width, y1: rise(sqnr), y2: rise(sqnr), class: "rule"}),
      draw("text", {x: 2, y: rise(sqnr) - 3}, `${sqnr} dB`),
    ];
    const label = (log) =>
      draw("text", {x: place(log), y: bottom + 18, "text-anchor": "middle"}, ...raised(log));
    box.replaceChildren(
      draw(
        "svg",
        {width, height, viewBox: `0 0 ${width} ${height}`, class: state.fmt.name.toLowerCase(), role: "img",
          "aria-label": "The SQNR as the scale grows"},
        ...rule(0), ...rule(20), ...rule(40),
        draw("polyline", {points: path, class: "curve"}),
        draw("line", {x1: place(state.log), x2: place(state.log), y1: 6, y2: bottom, class: "now"}),
        draw("circle", {cx: place(state.log), cy: rise(now), r: 5, class: "dot"}),
        ...[-16, -8, 0, 8, 16].map(label),
        draw("text", {x: width - 4, y: bottom + 18, "text-anchor": "end", class: "what"}, "scale"),
      ),
    );
  }

  function redraw() {
    const scale = scaleOf(state.log);
    figures(scale, numbers.castStats(state.xs, scale, state.fmt));
    histogram(scale);
    curve();
  }

  function setScale(log) {
    state.log = Math.min(Math.max(log, Number(slider.min)), Number(slider.max));
    slider.value = state.log;
    redraw();
  }

  /** A drag over an element: begin(event), then move(event) with each move. */
  function dragged(element, begin, move) {
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      element.setPointerCapture(event.pointerId);
      begin(event);
    });
    element.addEventListener("pointermove", (event) => {
      if (element.hasPointerCapture(event.pointerId)) move(event);
    });
  }

  let grabbed = {x: 0, log: 0};
  dragged(
    byId("histogram"),
    (event) => (grabbed = {x: event.clientX, log: state.log}),
    (event) => {
      const [low, high] = SHOWN.get(state.fmt);
      setScale(grabbed.log + ((event.clientX - grabbed.x) / byId("histogram").clientWidth) * (high - low));
    },
  );
  function toPlace(event) {
    const box = byId("curve").getBoundingClientRect();
    const [from, to] = [Number(slider.min), Number(slider.max)];
    setScale(from + ((event.clientX - box.left) / box.width) * (to - from));
  }
  dragged(byId("curve"), () => {}, toPlace);
  byId("curve").addEventListener("click", toPlace); // a finger that scrolls the page begins here, too, but is no click

  offer(byId("tensor"), Object.entries(TENSORS).map(([key, [text]]) => [key, text]), state.tensor);
  offer(byId("scale-format"), [E4M3, E5M2, E2M1].map((fmt) => [fmt.name, fmt.name]), state.fmt.name);
  byId("histogram-caption").textContent =
    `A bar counts those of ${COUNT.toLocaleString("en-US")} numbers with this |x · scale|; each doubling has the same ` +
    "width. A mark below the bars is a code: a number goes to the nearest mark. In the left zone it becomes 0, in the " +
    "right zone the largest code.";
  slider.addEventListener("input", () => setScale(Number(slider.value)));
  byId("power").addEventListener("change", redraw);
  byId("tensor").addEventListener("change", (event) => {
    state.tensor = event.target.value;
    state.xs = TENSORS[state.tensor][1]();
    redraw();
  });
  byId("scale-format").addEventListener("change", (event) => {
    state.fmt = numbers[event.target.value];
    redraw();
  });
  byId("amax").addEventListener("click", () => {
    const amax = state.xs.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
    setScale(Math.log2(numbers.largest(state.fmt) / amax));
  });
  atEachWidth(byId("histogram"), redraw);
}
