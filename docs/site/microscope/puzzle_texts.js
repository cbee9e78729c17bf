"use strict";
/* What the puzzles ask, and the function that each begins with. Their numbers and names are those of the notebook. */

const puzzleTexts = [
  {
    name: "1 decode",
    title: "What is a code's value?",
    text: `An E4M3 code has a sign bit, 4 exponent bits with bias 7, and 3 mantissa bits. Exponent field 0 means a
subnormal number. Codes 0x7F and 0xFF are NaN, and there are no infinities.`,
    stub: `function decode(code) {
  // 0..255 -> the value, a number

}`,
  },
  {
    name: "2 encode",
    title: "And the other way?",
    text: `The result is the nearest value's code. Half way between two values it is the code whose last bit is 0. A
finite number beyond ±448 becomes ±448. NaN becomes 0x7F, whatever its sign, and so does an infinity. The sign of zero
is kept. Your function is tried on all 65,536 bf16 numbers.`,
    hint: `Math.round rounds halves up, not to even. Object.is(x, -0) finds the sign of zero. A carry out of the
mantissa may run into the exponent field by itself.`,
    stub: `function encode(x) {
  // a number -> its E4M3 code, 0..255

}`,
  },
  {
    name: "3 quantise",
    title: "A tensor and its scale",
    text: `Gradients are cast to E5M2 after multiplication with a scale. The multiplication rounds once, to fp32
(Math.fround). E5M2 has 5 exponent bits with bias 15 and 2 mantissa bits; the largest value is 57,344. NaN and an
infinite x become 0x7F. An infinite product of a finite x does not: it becomes ±57,344.`,
    stub: `function quantise(x, scale) {
  // x: Float32Array [n], scale: an fp32 number -> codes: Uint8Array [n]

}`,
  },
  {
    name: "4 scale_update",
    title: "The scale of the next step",
    text: `Delayed scaling. history holds the amaxes of past steps; entry 0 holds that of the step that has just ended.
(1) last = entry 0. If it is 0, nothing was cast: change nothing. (2) All entries move to the place before, and last
becomes the last entry. (3) amax is the largest of the moved entries that is finite. (4) Entry 0 becomes 0.
(5) scale = fp8_max / amax in fp32, if amax is finite and positive. If the quotient is infinite, take the largest finite
fp32 number.`,
    stub: `function scale_update(scale, history, fp8_max) {
  // an fp32 number, Float32Array [rows], a number -> [new scale, new history]

}`,
  },
  {
    name: "5 bias_gradient",
    title: "The order of a sum",
    text: `A bias's gradient is the sum of a gradient's rows, in fp32. Additions round, so the bits depend on the order.
Rows come in blocks of 64; missing rows are +0. A block is four runs of 16 rows. In a run, for h = 8, 4, 2, 1, row r + h
is added to row r, for all r < h. The four runs' sums are added likewise, for h = 2, 1. The blocks' sums are added in
order.`,
    hint: "Math.fround(x + y) is one fp32 addition; so is an assignment to an element of a Float32Array.",
    stub: `function bias_gradient(g) {
  // a list of rows, each a Float32Array [columns] -> Float32Array [columns]

}`,
  },
  {
    name: "6 term",
    title: "One product inside the tensor core",
    text: `The tensor core needs a product of two E4M3 codes as an integer and an exponent: product = significand ·
2^(exponent − 6). The significand is the product of the two codes' significands (8 + mantissa, or mantissa if
subnormal), with the product's sign. The exponent is the sum of both codes' exponents. It is not renormalised. There is
no NaN among the inputs.`,
    stub: `function term(a, b) {
  // two E4M3 codes -> [significand, exponent], two integers

}`,
  },
  {
    name: "7 instruction",
    title: "32 products and C",
    text: `One instruction. The largest exponent of the nonzero terms is emax; C's exponent is that of its leading bit.
Cut each term to multiples of 2^(emax − 13), toward zero. Add exactly. Cut the sum to 13 bits after its leading bit,
toward zero. The words are those of an H200. The tensor core above shows each step.`,
    hint: "Your earlier functions are not here: paste term() below this one. Math.trunc cuts toward zero.",
    stub: `function instruction(a, b, c) {
  // 32 codes, 32 codes, and an fp32 number -> an fp32 number

}`,
  },
];
