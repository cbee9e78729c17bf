"use strict";
/* Part 1: a number in each format. */

{
  const {E4M3, E5M2, E8M0, E2M1} = numbers;
  const ABOUT = new Map([
    [E4M3, "weights and activations"],
    [E5M2, "gradients"],
    [E8M0, "scales of blocks: a power of two"],
    [E2M1, "four bits, for Blackwell"],
  ]);
  const EXAMPLES = ["0.1", "1/3", "17", "0.75", "448", "464", "500", "2^-10", "-0", "inf", "nan"];
  const input = byId("x");

  /** Why x has this code, in one sentence. */
  function reason(x, fmt, found) {
    const {rule, lower, upper, value} = found;
    const sign = x < 0 ? -1 : 1;
    const [low, high, got] = [lower * sign || 0, upper * sign, value].map(shown);
    if (fmt === E8M0) {
      const sizes = x < 0 || Object.is(x, -0) ? "E8M0 has no sign, so this is |x|. " : "";
      if (rule === "nan") return "NaN stays NaN.";
      if (rule === "exact") return `${sizes}A power of two: exact.`;
      if (rule === "saturated") return `${sizes}Beyond the largest power of two.`;
      return `${sizes}Always up to the next power of two, so that no number of the block saturates.`;
    }
    if (Number.isNaN(x)) return fmt === E2M1 ? "E2M1 has no NaN: it becomes 0." : "Every NaN becomes 0x7F.";
    if (rule === "nan") return "An infinity becomes NaN: an overflow must be seen.";
    if (rule === "exact") return "Exact.";
    if (rule === "saturated") return `Beyond ${got}, the last value: saturated.`;
    const between = `Between ${low} and ${high}: `;
    if (rule === "tie") return `${between}half way. The code whose last bit is 0 wins.`;
    return `${between}${got} is nearer.`;
  }

  /** A line from the value nearer to 0 to the one beyond x, with x on it. */
  function line(x, fmt, {rule, lower, upper, value}) {
    if (rule === "nan" || rule === "exact") return null;
    const sign = x < 0 && fmt !== E8M0 ? -1 : 1;
    const size = Math.abs(x);
    const open = rule === "saturated";
    const at = open ? 0.86 : (size - lower) / (upper - lower);
    const place = (part) => 16 + 268 * part;
    const chosen = Math.abs(value) === lower ? 0 : 1;
    const tick = (part, cls) => draw("line", {x1: place(part), x2: place(part), y1: 14, y2: 30, class: cls});
    const text = (part, what, anchor) =>
      draw("text", {x: part === 0 ? 2 : part === 1 ? 298 : 150, y: 44, "text-anchor": anchor}, what);
    return draw(
      "svg",
      {viewBox: "0 0 300 50", class: "between", "aria-hidden": "true"},
      draw("line", {x1: place(0), x2: place(1), y1: 22, y2: 22, class: "axis"}),
      tick(0, "axis"),
      open ? null : tick(1, "axis"),
      open || fmt === E8M0 ? null : tick(0.5, "middle"),
      draw("line", {x1: place(at), x2: place(open ? 0 : chosen), y1: 22, y2: 22, class: "move"}),
      draw("circle", {cx: place(at), cy: 22, r: 5, class: "dot"}),
      draw("circle", {cx: place(open ? 0 : chosen), cy: 22, r: 6, class: "chosen"}),
      text(0, short(lower * sign || 0), "start"),
      text(1, open ? "no value" : short(upper * sign), "end"),
    );
  }

  /** The bits of a code, each a button. */
  function bits(code, fmt) {
    const part = numbers.fields(code, fmt);
    const name = (bit) => {
      if (fmt !== E8M0 && bit === fmt.bits - 1) return "sign";
      return bit >= fmt.mantissaBits ? "exponent" : "mantissa";
    };
    const buttons = Array.from({length: fmt.bits}, (_, i) => {
      const bit = fmt.bits - 1 - i;
      const [set, what] = [(code >> bit) & 1, name(bit)];
      const last = bit > 0 && name(bit - 1) !== what ? " last" : "";
      const label = `${fmt.name}, bit ${bit}, ${what}`;
      const flip = () => flipped(code ^ (1 << bit), fmt, bit);
      return make(
        "button",
        {type: "button", class: `bit ${what}${last}`, "aria-pressed": set ? "true" : "false", "aria-label": label,
          "data-bit": `${fmt.name}${bit}`, click: flip},
        String(set),
      );
    });
    const legend = [
      fmt === E8M0 ? null : `sign ${part.sign ? "−" : "+"}`,
      `exponent ${part.exponent}`,
      fmt.mantissaBits ? `mantissa ${part.mantissa}` : null,
    ];
    return [
      make("div", {class: "bits", role: "group", "aria-label": `The bits of the ${fmt.name} code`}, ...buttons),
      make("p", {class: "fields"}, legend.filter(Boolean).join(" · ")),
    ];
  }

  /** What a code's value is made of. */
  function formula(code, fmt) {
    const {sign, exponent, mantissa, kind} = numbers.fields(code, fmt);
    if (kind === "NaN" || kind === "infinity" || kind === "zero") return make("p", {class: "formula"}, kind);
    if (fmt === E8M0) return make("p", {class: "formula"}, power(exponent - fmt.bias));
    const fraction = mantissa.toString(2).padStart(fmt.mantissaBits, "0");
    const significand = `${sign ? "−" : ""}${exponent ? 1 : 0}.${fraction}`;
    return make(
      "p",
      {class: "formula"},
      significand, make("sub", {}, "2"), " · ", power(Math.max(exponent, 1) - fmt.bias), ` (${kind})`,
    );
  }

  function card(x, fmt, code, typed) {
    const value = numbers.decode(code, fmt);
    const size = fmt === E8M0 ? Math.abs(x) : x;
    const found = typed ? numbers.rounding(x, fmt) : null;
    const error = value - size;
    const relative = size === 0 ? "" : ` (${short((100 * Math.abs(error)) / Math.abs(size))} %)`;
    return make(
      "article",
      {class: `card ${fmt.name.toLowerCase()}`, "aria-label": fmt.name},
      make("h3", {}, fmt.name, make("small", {}, ABOUT.get(fmt))),
      ...bits(code, fmt),
      make(
        "p",
        {class: "value"},
        make("code", {}, numbers.hex(code, fmt.bits / 4)), " = ", make("strong", {}, shown(value)),
      ),
      formula(code, fmt),
      found && line(x, fmt, found),
      make("p", {class: "reason"}, found ? reason(x, fmt, found) : "A code that you set."),
      make(
        "p",
        {class: "error"},
        Number.isFinite(error) ? (error === 0 ? "No error" : `Error ${short(error)}${relative}`) : "",
      ),
    );
  }

  /** Show a number in all formats; `code` of `own` is as it was set, where several codes are one value. */
  function show(x, own = null, code = 0) {
    const word = Math.fround(x);
    const cards = Object.values(numbers.FORMATS).map((fmt) => {
      const cast = fmt === E8M0 ? numbers.e8m0Above(Math.abs(word)) : numbers.cast(word, 1, fmt);
      const same = own === fmt && code !== cast;
      return card(word, fmt, same ? code : cast, !same);
    });
    byId("cards").replaceChildren(...cards);
    byId("x-said").textContent = Array.from(document.querySelectorAll(".card"), (each) =>
      `${each.getAttribute("aria-label")}: ${each.querySelector(".value").textContent}`).join(". ");
    const rounded = Number.isFinite(x) && word !== x;
    byId("x-note").textContent = rounded ? `A cast begins with fp32: ${shown(word)}.` : "";
    input.removeAttribute("aria-invalid");
  }

  function flipped(code, fmt, bit) {
    const value = numbers.decode(code, fmt);
    input.value = Number.isFinite(value) && value !== 0 ? String(value) : numbers.g(value);
    show(value, fmt, code);
    document.querySelector(`[data-bit="${fmt.name}${bit}"]`).focus({preventScroll: true});
  }

  function typed() {
    const x = parsed(input.value);
    if (x !== undefined) return show(x);
    input.setAttribute("aria-invalid", "true");
    byId("x-note").textContent = input.value.trim()
      ? "This is no number; below is the last one. Accepted are 0.1 (with a point), 1e-5, 1/3, 2^-9, inf and nan."
      : "Type a number.";
  }

  byId("examples").append(
    ...EXAMPLES.map((text) =>
      make("button", {type: "button", click: () => ((input.value = text), typed())}, text.replaceAll("-", "−")),
    ),
  );
  input.addEventListener("input", typed);
  typed();
}
