"use strict";
/* Puzzles 1 to 7 of notebooks/puzzles.ipynb for answers in JavaScript, graded as notebooks/puzzles.py grades: the same
   inputs in the same order, the same words expected, the same sentence. Inside one function for the Worker's sake, as
   numbers.js. `recorded` is that of recorded.js. */

function makePuzzles(numbers, recorded) {
  const {E4M3, E5M2, bytesOf, cast, decode, fields, g, hex, normal, numberOf, philox, wordOf} = numbers;
  const floats = (base64) => new Float32Array(bytesOf(base64).buffer);

  // ---- words: how each dtype reads an answer, compares and shows it -----------------------------------------------

  const float32 = {
    name: "float32",
    array: Float32Array,
    read: (x) => (typeof x === "number" || typeof x === "boolean" ? Math.fround(Number(x)) : undefined),
    equal: (x, y) => (Number.isNaN(x) && Number.isNaN(y)) || wordOf(x) === wordOf(y), // every NaN is the same
    shown: (x) => `${hex(wordOf(x), 8)} (${g(x)})`,
  };
  const int64 = {
    name: "int64",
    array: BigInt64Array,
    read: (x) => (Number.isFinite(x) || typeof x === "boolean" ? Math.trunc(Number(x)) || 0 : undefined),
    equal: (x, y) => x === y,
    shown: (x) => `${hex(BigInt.asUintN(64, BigInt(x)), 16)} (${g(x)})`,
  };
  const codesOf = (fmt) => ({
    name: "code",
    array: Uint8Array,
    read: (x) => (Number.isInteger(Number(x)) && typeof x !== "string" && x >= 0 && x < 256 ? Number(x) : undefined),
    equal: (x, y) => x === y,
    shown: (x) => `${hex(x, 2)} (${g(decode(x, fmt))})`,
  });

  /** A value as a sentence shows it. */
  function repr(got) {
    if (typeof got === "string") return `'${got}'`;
    if (Array.isArray(got)) return `[${got.map(repr).join(", ")}]`;
    if (typeof got === "number") return Number.isFinite(got) ? String(got) : g(got);
    return typeof got === "function" ? "a function" : String(got);
  }

  const isList = (got) => Array.isArray(got) || ArrayBuffer.isView(got);

  /** An answer as a list of numbers like `expected` (a list, or one number), or a sentence on what is wrong with it. */
  function asList(got, expected, dtype) {
    const wanted = dtype.name === "code" ? "a code from 0 to 255 is expected." : `torch.${dtype.name} is expected.`;
    if (ArrayBuffer.isView(got) && !(got instanceof dtype.array)) {
      return `the answer is a ${got.constructor.name}, a ${dtype.array.name} is expected.`;
    }
    const list = isList(got) ? Array.from(got, (x) => (typeof x === "bigint" ? Number(x) : x)) : [got];
    const read = list.map(dtype.read);
    if (read.includes(undefined)) return `the answer is ${repr(got)}, ${wanted}`;
    const shapes = [got, expected].map((each) => (isList(each) ? `[${each.length}]` : "[]"));
    if (shapes[0] !== shapes[1]) return `the answer has shape ${shapes[0]}, ${shapes[1]} is expected.`;
    return read;
  }

  /** Call `answer` on all of a puzzle's inputs: {solved, sentence}. An error of it passes through. */
  function grade(name, answer) {
    if (!(name in CHECKS)) {
      throw new Error(`there is no puzzle '${name}'; the puzzles are ${Object.keys(CHECKS).join(", ")}.`);
    }
    let [count, wrong, first] = [0, 0, ""];
    for (const [where, got, expected, dtype] of CHECKS[name](answer)) {
      if (got === undefined || got === null) {
        const forgotten = `${where}: the answer is ${got}; is there a path without \`return\`?`;
        return {solved: false, sentence: `${name}: ${count ? forgotten : "not solved yet."}`};
      }
      const list = asList(got, expected, dtype);
      if (typeof list === "string") return {solved: false, sentence: `${name}: ${where}: ${list}`};
      const words = isList(expected) ? expected : [expected];
      count += words.length;
      for (let i = 0; i < words.length; i++) {
        if (dtype.equal(list[i], words[i])) continue;
        wrong += 1;
        const index = isList(expected) ? `, index [${i}]` : "";
        first ||= `${where}${index}: got ${dtype.shown(list[i])}, expected ${dtype.shown(words[i])}.`;
      }
    }
    const counted = (n) => n.toLocaleString("en-US");
    if (!wrong) return {solved: true, sentence: `${name}: solved, all ${counted(count)} words agree.`};
    return {
      solved: false,
      sentence: `${name}: ${counted(wrong)} of ${counted(count)} words are wrong. The first is ${first}`,
    };
  }

  // ---- the puzzles: each yields [where, got, expected, dtype] -----------------------------------------------------

  function* decodes(answer) {
    for (let code = 0; code < 256; code++) {
      yield [`code ${hex(code, 2)}`, answer(code), decode(code, E4M3), float32];
    }
  }

  function* encodes(answer) {
    const dtype = codesOf(E4M3);
    for (let word = 0; word < 1 << 16; word++) {
      const x = numberOf(word << 16);
      yield [`x = ${g(x)}`, answer(x), cast(x, 1, E4M3), dtype];
    }
  }

  function* quantises(answer) {
    const words = Uint32Array.from({length: 1 << 16}, (_, i) => philox(i, 11)[0]);
    words.set([0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0, 0x80000000, 1, 0x7f7fffff]);
    const xs = new Float32Array(words.buffer);
    const expected = Array.from(xs, (x) => cast(x, 37.5, E5M2));
    yield ["q", answer(xs.slice(), 37.5), expected, codesOf(E5M2)];
  }

  function* scaleUpdates(answer) {
    for (const {where, words} of recorded.scale_update) {
      const all = floats(words);
      const rows = all.length / 2 - 1;
      const got = answer(all[0], all.slice(1, rows + 1), 448) ?? [undefined, undefined];
      const [scale, history] = isList(got) ? got : [got, undefined];
      yield [`${where}, scale`, scale, all[rows + 1], float32];
      yield [`${where}, history`, history, all.slice(rows + 2), float32];
    }
  }

  function* biasGradients(answer) {
    const columns = 48;
    for (const {rows, words} of recorded.bias_gradient) {
      const drawn = normal(rows * columns, 31);
      const matrix = Array.from({length: rows}, (_, row) =>
        drawn.slice(row * columns, (row + 1) * columns).map((x) => x * 2 ** ((row % 16) - 8)),
      );
      yield [`${rows} rows`, answer(matrix), floats(words), float32];
    }
  }

  function* terms(answer) {
    for (let a = 0; a < 256; a += 3) {
      for (let b = 1; b < 256; b += 5) {
        if ((a & 0x7f) === 0x7f || (b & 0x7f) === 0x7f) continue;
        const [f, s] = [fields(a, E4M3), fields(b, E4M3)];
        const [left, right] = [f, s].map((part) => 8 * (part.exponent > 0) + part.mantissa);
        const exponent = Math.max(f.exponent, 1) + Math.max(s.exponent, 1) - 14;
        const expected = [(f.sign ^ s.sign ? -1 : 1) * left * right || 0, exponent]; // || 0: an integer has no -0
        const got = answer(a, b);
        yield [`codes ${hex(a, 2)}, ${hex(b, 2)}`, got, expected, int64];
      }
    }
  }

  function* instructions(answer) {
    const {tiles} = recorded.instruction;
    const [a, b] = [bytesOf(recorded.instruction.a), bytesOf(recorded.instruction.b)];
    const [c, d] = [floats(recorded.instruction.c), floats(recorded.instruction.d)];
    for (let tile = 0; tile < tiles; tile++) {
      for (let row = 0; row < 64; row++) {
        for (let column = 0; column < 8; column++) {
          const [left, right, at] = [(tile * 64 + row) * 32, (tile * 8 + column) * 32, (tile * 64 + row) * 8 + column];
          const codes = [a.slice(left, left + 32), b.slice(right, right + 32)].map((each) => Array.from(each));
          yield [`tile ${tile}, row ${row}, column ${column}`, answer(...codes, c[at]), d[at], float32];
        }
      }
    }
  }

  const CHECKS = {
    "1 decode": decodes,
    "2 encode": encodes,
    "3 quantise": quantises,
    "4 scale_update": scaleUpdates,
    "5 bias_gradient": biasGradients,
    "6 term": terms,
    "7 instruction": instructions,
  };

  return {grade, names: Object.keys(CHECKS)};
}
