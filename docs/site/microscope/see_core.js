"use strict";
/* Part 3: one FP8 instruction of Hopper's tensor core, step by step. */

{
  const {E4M3, E5M2, FRACTION, bytesOf, numberOf, wordOf, hex} = numbers;
  const K = 32;
  const LOST = 12; // how many of the bits below the cut are shown
  const KEPT = FRACTION + 2; // bits of an aligned term: a product's significand is below 4
  const CASES = {
    uniform: "any exponent",
    plain: "numbers around 1",
    no_c: "numbers around 1, C = ±0",
    sparse: "mostly zeros",
    cancel: "pairs that cancel",
    subnormal: "subnormal operands",
    tiny_c: "a tiny C",
    subnormal_c: "a subnormal C",
    huge_c: "a huge C",
    zeros: "nearly all products 0",
    special: "NaN and infinity in a, b",
    special_c: "NaN and infinity in C",
    drawn: "a bell curve, C = 0 (of puzzle 7)",
  };
  const STAGES = [
    ["multiply", "Each product is an integer and a power of two. It is exact: four bits times four bits are eight."],
    ["align", "The largest exponent of the terms that are not 0, emax, decides. All terms are lined up to it."],
    ["cut", `What lies more than ${FRACTION} bits below emax is cut off, toward zero. Nothing is rounded.`],
    ["add", "What is left are small integers. Their sum is exact, so its order does not matter."],
    ["cut the sum", `${FRACTION} bits after the sum's leading bit are kept, toward zero; an fp32 word could hold 23.`],
  ];
  const state = {aFormat: E4M3, bFormat: E4M3, a: [], b: [], c: 0, recorded: null, stage: 0, case: "uniform", index: 0};

  // ---- what an H200 recorded --------------------------------------------------------------------------------------

  /** The recorded instructions of the two formats and the case, each as a function that reads it. */
  function recordedSteps() {
    const formats = `${state.aFormat.name}.${state.bFormat.name}`.toLowerCase();
    if (state.case === "drawn") {
      const {tiles, a, b, c, d} = recorded.instruction;
      const [left, right, from, to] = [a, b, c, d].map(bytesOf);
      const [old, word] = [new Uint32Array(from.buffer), new Uint32Array(to.buffer)];
      return Array.from({length: tiles * 64}, (_, row) => () => {
        const [tile, column] = [Math.floor(row / 64), row % 8];
        const [i, j, k] = [row * K, (tile * 8 + column) * K, row * 8 + column];
        return {a: left.slice(i, i + K), b: right.slice(j, j + K), c: old[k], d: word[k]};
      });
    }
    const wordIn = (base64) => new Uint32Array(bytesOf(base64).buffer)[0];
    return recorded.steps
      .filter((one) => one.formats === formats && one.case === state.case)
      .map((one) => () => ({a: bytesOf(one.a), b: bytesOf(one.b), c: wordIn(one.c), d: wordIn(one.d)}));
  }

  function load(index) {
    const steps = recordedSteps();
    state.index = index % steps.length;
    const {a, b, c, d} = steps[state.index]();
    Object.assign(state, {a: Array.from(a), b: Array.from(b), c, recorded: d});
    byId("which").textContent =
      `Recorded on an ${recorded.about.gpu} in ${recorded.about.date.slice(0, 4)}: ` +
      `${state.index + 1} of ${steps.length.toLocaleString("en-US")}.`;
    redraw();
  }

  /** Numbers that no recording has: of each row [a, b], and C. */
  const FILLS = {
    "all ones": () => [() => [1, 1], 0],
    "one large, 31 ones": () => [(k) => (k === 0 ? [256, 256] : [1, 1]), 0],
    "ones, and a large C": () => [() => [1, 1], 2 ** 20],
    random: () => {
      const drawn = numbers.normal(2 * K, Math.floor(Math.random() * 2 ** 32));
      return [(k) => [drawn[2 * k], drawn[2 * k + 1]], 0];
    },
  };

  function fill([pair, c]) {
    for (let k = 0; k < K; k++) {
      const [a, b] = pair(k);
      state.a[k] = numbers.cast(a, 1, state.aFormat);
      state.b[k] = numbers.cast(b, 1, state.bFormat);
    }
    state.c = wordOf(c);
    own();
  }

  /** The numbers are no longer those of a recording. */
  function own() {
    state.recorded = null;
    byId("which").textContent = "Your own numbers.";
    redraw();
  }

  // ---- bits -------------------------------------------------------------------------------------------------------

  /** |significand| · 2^power in units of 2^unit, as bits: those kept, LOST that are cut off, whether more follow. */
  function aligned(significand, termPower, unit) {
    const size = BigInt(Math.abs(significand));
    const shift = termPower - unit + LOST;
    const all = shift >= 0 ? size << BigInt(shift) : size >> BigInt(-shift);
    const more = shift < 0 && all << BigInt(-shift) !== size;
    const bits = all.toString(2).padStart(KEPT + LOST, "0");
    return {kept: `${bits.slice(0, 2)}.${bits.slice(2, KEPT)}`, lost: bits.slice(KEPT), more};
  }

  /** The exact sum of the terms, as float64. */
  function exactSum(found) {
    const LOW = 240;
    let total = 0n;
    found.significand.forEach((significand, k) => {
      total += BigInt(significand) << BigInt(found.power[k] + LOW);
    });
    return Number(total) * 2 ** -LOW;
  }

  /** The sum in fp32 as a program adds it: C, then one product after another, each addition rounded to nearest. */
  const fp32Sum = (found) =>
    Array.from(found.significand, (significand, k) => significand * 2 ** found.power[k])
      .reduceRight((total, term) => Math.fround(total + term), 0);

  // ---- drawing ----------------------------------------------------------------------------------------------------

  /** As many digits as an fp32 number has; six are enough for a code. */
  const nineDigits = (x) => (Number.isFinite(x) && x !== 0 ? String(Number(x.toPrecision(9))) : numbers.g(x));

  /** An input whose number is cast to a format when it is left. */
  function operand(label, read, take) {
    const input = make("input", {"aria-label": label, "data-label": label, autocomplete: "off", autocapitalize: "off",
      spellcheck: "false"});
    input.addEventListener("change", () => {
      const x = parsed(input.value);
      if (x === undefined) return input.setAttribute("aria-invalid", "true");
      take(x);
      own();
    });
    return {input, read};
  }

  /** The operand of a side, a or b, in row k. */
  const code = (side, k) =>
    operand(
      `${side} ${k + 1}`,
      () => numbers.decode(state[side][k], state[`${side}Format`]),
      (x) => {
        const fmt = state[`${side}Format`];
        state[side][k] = Number.isFinite(x) ? numbers.cast(x, 1, fmt) : wholeCode(x, fmt);
      },
    );

  /** The rows: 32 pairs and C. They stay, so that the focus does; `terms` fills in what depends on the numbers. */
  const rows = Array.from({length: K + 1}, (_, k) => {
    const operands = k < K
      ? [code("a", k), code("b", k)]
      : [operand("C", () => numberOf(state.c), (x) => (state.c = wordOf(x)))];
    const head = make("span", {class: "k"}, k < K ? String(k + 1) : "C");
    const row = make("div", {}, head, ...operands.map(({input}) => input));
    return {row, operands, rest: []};
  });

  function bitsOf(found, k) {
    const significand = found.significand[k];
    if (found.special || significand === 0) return make("span", {class: "strip zero"}, found.special ? "" : "0");
    const sign = significand < 0 ? "−" : "+";
    if (state.stage === 0) {
      const size = Math.abs(significand).toString(2);
      return make("span", {class: "strip"}, `${sign}${size}`);
    }
    const {kept, lost, more} = aligned(significand, found.power[k], found.unit);
    const cut = state.stage >= 2;
    const first = kept.search("1");
    const [zeros, digits] = first < 0 ? [kept, ""] : [kept.slice(0, first), kept.slice(first)];
    const below = more ? `${lost}…` : lost.replace(/0+$/, "");
    const leading = digits ? "" : /^0*/.exec(below)[0];
    return make(
      "span",
      {class: "strip"},
      sign, make("i", {}, zeros), make("b", {}, digits), make("i", {}, leading),
      make("span", {class: cut ? "cut" : "low"}, below.slice(leading.length)),
    );
  }

  const unitHead = make("span", {class: "strip"});

  function terms(found) {
    rows.forEach(({row, operands, rest}, k) => {
      const nothing = found.significand[k] === 0;
      const top = state.stage > 0 && !nothing && found.exponent[k] === found.emax;
      row.className = `term${k === K ? " c" : ""}${top ? " top" : ""}${nothing ? " nothing" : ""}`;
      for (const {input, read} of operands) {
        input.value = k === K ? nineDigits(read()) : numbers.g(read());
        input.removeAttribute("aria-invalid");
      }
      const product = nothing ? ["0"] : [`${shown(found.significand[k])} · `, power(found.power[k])];
      for (const old of rest.splice(0)) old.remove();
      rest.push(make("span", {class: "product"}, ...product), bitsOf(found, k));
      row.append(...rest);
    });
    unitHead.replaceChildren(...(state.stage === 0 ? ["significand in bits"] : ["in units of ", power(found.emax)]));
  }

  /** NaN and infinity as operands: the cast would make NaN of both, but E5M2 has codes for infinity. */
  function wholeCode(x, fmt) {
    if (Number.isNaN(x) || fmt === E4M3) return fmt.nanCode;
    return x < 0 ? 0xfc : 0x7c;
  }

  /** The sum as bits: those of the result, and those that are cut off. */
  function sumBits(found) {
    const bits = Math.abs(found.total).toString(2);
    const kept = bits.slice(0, FRACTION + 1);
    return make("span", {class: "strip"}, found.total < 0 ? "−" : "+", make("b", {}, kept),
      make("span", {class: state.stage === 4 ? "cut" : "low"}, bits.slice(FRACTION + 1)));
  }

  function sum(found) {
    const line = (name, ...what) => make("div", {class: "line"}, make("dt", {}, name), make("dd", {}, ...what));
    const lines = [];
    if (found.special) {
      const rule = "A NaN, or infinities of both signs, make the word 0x7FFFFFFF; otherwise an infinity wins.";
      lines.push(line("special", rule));
    } else {
      if (state.stage >= 1) {
        lines.push(line("emax", String(shown(found.emax)), " (the marked terms have it)"));
      }
      if (state.stage >= 3) {
        lines.push(line("sum", `${shown(found.total)} · `, power(found.unit), " = ", sumBits(found)));
      }
    }
    if (state.stage === 4 || found.special) {
      const value = numberOf(found.word);
      lines.push(line("result", make("code", {}, hex(found.word, 8)), " = ", make("strong", {}, shown(value))));
      const agree = state.recorded === found.word;
      const verdict =
        state.recorded === null
          ? line("an H200", "It was not asked: no recording has these numbers. The same rule gives every recorded word.")
          : line("an H200", make("code", {}, hex(state.recorded, 8)),
            make("strong", {class: agree ? "right" : "wrong"}, agree ? " the same 32 bits ✓" : " another word ✗"));
      lines.push(verdict);
      if (!found.special) {
        const [exact, ordinary] = [exactSum(found), fp32Sum(found)];
        const lost = value === exact ? ": nothing was lost" : ` (off by ${short(Math.abs(value - exact))})`;
        lines.push(line("exact sum", shown(exact), lost));
        lines.push(line("added in fp32", shown(ordinary), ordinary === value ? "" : ": what a program's loop gives"));
      }
    }
    byId("sum").replaceChildren(make("dl", {}, ...lines));
  }

  function redraw() {
    const found = numbers.step(state.a, state.b, state.c, state.aFormat, state.bFormat);
    terms(found);
    sum(found);
    byId("stage-said").textContent = STAGES[state.stage][1];
  }

  function formatsChanged() {
    state.aFormat = numbers[byId("a-format").value];
    state.bFormat = numbers[byId("b-format").value];
    const both = state.aFormat === E4M3 && state.bFormat === E4M3;
    if (state.case === "drawn" && !both) state.case = "uniform";
    offer(byId("case"), Object.entries(CASES).filter(([key]) => both || key !== "drawn"), state.case);
    load(0);
  }

  function toStage(i) {
    state.stage = i;
    byId("stages").querySelector(`[value="${i}"]`).checked = true;
    byId("next").disabled = i === STAGES.length - 1;
    redraw();
  }

  byId("stages").append(
    ...STAGES.map(([name], i) =>
      make(
        "label",
        {},
        make("input", {type: "radio", name: "stage", value: i, checked: i === state.stage,
          change: () => toStage(i)}),
        make("span", {}, `${i + 1} ${name}`),
      ),
    ),
  );
  byId("next").addEventListener("click", () => toStage(state.stage + 1));
  for (const side of ["a-format", "b-format"]) {
    offer(byId(side), [E4M3, E5M2].map((fmt) => [fmt.name, fmt.name]), "E4M3");
    byId(side).addEventListener("change", formatsChanged);
  }
  byId("case").addEventListener("change", (event) => { state.case = event.target.value; load(0); });
  byId("another").addEventListener("click", () => load(state.index + 1));
  byId("fill").append(
    ...Object.entries(FILLS).map(([name, numbersOf]) =>
      make("button", {type: "button", click: () => fill(numbersOf())}, name),
    ),
  );
  byId("terms").append(
    make(
      "div",
      {class: "term head", "aria-hidden": "true"},
      make("span", {class: "k"}, "k"), make("span", {}, "a"), make("span", {}, "b"),
      make("span", {class: "product"}, "product"), unitHead,
    ),
    rows[K].row, // C first, where it is seen
    ...rows.slice(0, K).map(({row}) => row),
  );
  formatsChanged();
}
