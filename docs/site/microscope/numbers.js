"use strict";
/* FP8's arithmetic, without a page: what reference/numbers defines, in integers, in the same bits.

   formats.py, block_formats.py  fields and values of codes; casts          decode, encode, cast, e8m0Above, rounding
   tensor_core/model.py          one FP8 step of Hopper's tensor core       step
   philox.py                     random words, and normal numbers           philox, normal
   ops/casts/cast_stats.py       what a cast of a tensor lost               castStats

   A JavaScript number is a float64. An fp32 number is one that Math.fround leaves as it is; fround of a float64 product
   of two fp32 numbers is the fp32 product, as 48 bits hold it exactly. tests/pages/test_microscope.py compares all of
   it with `reference` and with the words that an H200 gave.

   Everything is inside one function, so that a Worker gets it, too, as text: a page that was opened from a file may not
   read its own scripts. */

function makeNumbers() {
  const E4M3 = {name: "E4M3", bits: 8, exponentBits: 4, mantissaBits: 3, bias: 7, largestCode: 0x7e, nanCode: 0x7f};
  const E5M2 = {name: "E5M2", bits: 8, exponentBits: 5, mantissaBits: 2, bias: 15, largestCode: 0x7b, nanCode: 0x7f};
  const E2M1 = {name: "E2M1", bits: 4, exponentBits: 2, mantissaBits: 1, bias: 1, largestCode: 7, nanCode: 0};
  const E8M0 = {name: "E8M0", bits: 8, exponentBits: 8, mantissaBits: 0, bias: 127, largestCode: 0xfe, nanCode: 0xff};
  const FORMATS = {E4M3, E5M2, E8M0, E2M1};

  // ---- words ------------------------------------------------------------------------------------------------------

  const oneFloat = new Float32Array(1);
  const oneWord = new Uint32Array(oneFloat.buffer);

  /** The 32 bits of an fp32 number (any number is rounded to fp32 first). */
  function wordOf(x) {
    oneFloat[0] = x;
    return oneWord[0];
  }

  /** The fp32 number of 32 bits. */
  function numberOf(word) {
    oneWord[0] = word;
    return oneFloat[0];
  }

  const hex = (word, digits) => `0x${word.toString(16).toUpperCase().padStart(digits, "0")}`;

  const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

  /** Base64 as bytes; atob belongs to browsers, and a bare V8 lacks it. */
  function bytesOf(base64) {
    const text = base64.replace(/=+$/, "");
    const bytes = new Uint8Array(Math.floor((text.length * 3) / 4));
    for (let i = 0, at = 0, held = 0, bits = 0; i < text.length; i++) {
      held = ((held << 6) | LETTERS.indexOf(text[i])) & 0xffff;
      bits += 6;
      if (bits >= 8) bytes[at++] = held >> (bits -= 8);
    }
    return bytes;
  }

  /** A number as Python's format "g" writes it: six digits, no zeros at the end. */
  function g(x) {
    if (Number.isNaN(x)) return "nan";
    if (!Number.isFinite(x)) return x < 0 ? "-inf" : "inf";
    if (x === 0) return Object.is(x, -0) ? "-0" : "0";
    // Half way between two numbers of six digits Python takes the even one, and JavaScript the larger one.
    const exact = x.toExponential(100);
    const half = /^-?\d\.\d{4}[02468]50*e/.test(exact);
    const [digits, power] = (half ? exact.replace(/50*e/, "e") : x.toExponential(5)).split("e");
    const exponent = Number(power);
    if (exponent >= -4 && exponent < 6) return String(Number(`${digits}e${power}`));
    const short = digits.replace(/\.?0+$/, "");
    return `${short}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }

  // ---- formats ----------------------------------------------------------------------------------------------------

  /** The parts of a code: {code, sign, exponent, mantissa, kind, value}; exponent and mantissa are its fields. */
  function fields(code, fmt) {
    if (fmt === E8M0) {
      const nan = code === E8M0.nanCode;
      const value = nan ? NaN : 2 ** (code - E8M0.bias);
      return {code, sign: 0, exponent: code, mantissa: 0, kind: nan ? "NaN" : "power of two", value};
    }
    const sign = code >> (fmt.bits - 1);
    const magnitude = code & ((1 << (fmt.bits - 1)) - 1);
    const exponent = magnitude >> fmt.mantissaBits;
    const mantissa = magnitude & ((1 << fmt.mantissaBits) - 1);
    let kind, value;
    if (magnitude > fmt.largestCode) {
      const infinite = fmt === E5M2 && mantissa === 0;
      [kind, value] = infinite ? ["infinity", Infinity] : ["NaN", NaN];
    } else if (exponent === 0) {
      // No leading one, and the exponent of the smallest normal numbers.
      kind = mantissa ? "subnormal" : "zero";
      value = mantissa * 2 ** (1 - fmt.bias - fmt.mantissaBits);
    } else {
      kind = "normal";
      value = ((1 << fmt.mantissaBits) + mantissa) * 2 ** (exponent - fmt.bias - fmt.mantissaBits);
    }
    return {code, sign, exponent, mantissa, kind, value: sign ? -value : value};
  }

  const tables = new Map(
    Object.values(FORMATS).map((fmt) => [
      fmt,
      Float64Array.from({length: 1 << fmt.bits}, (_, code) => fields(code, fmt).value),
    ]),
  );

  const decode = (code, fmt) => tables.get(fmt)[code];
  const largest = (fmt) => decode(fmt.largestCode, fmt);

  /** The magnitude of x · scale from which on a clamp costs more than rounding could: 464, 61,440; 7 in E2M1. */
  const limit = (fmt) => largest(fmt) + (largest(fmt) - decode(fmt.largestCode - 1, fmt)) / 2;

  /** The code of an fp32 number in E4M3, E5M2 or E2M1: nearest, ties to even, saturating; NaN is the format's.

      The significand is shifted down to the format's last place. The bits that are shifted out, and the parity of what
      stays, decide the rounding. A carry runs into the exponent by itself. */
  function encode(x, fmt) {
    const word = wordOf(x);
    const magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return fmt.nanCode;
    const exponent = (magnitude >> 23) - 127; // of the leading one; fp32's subnormals are far below every code
    const significand = (magnitude & 0x7fffff) | 0x800000;
    // Below the smallest normal exponent the last place does not move. A shift by 25 leaves less than half a place.
    const below = Math.max(0, 1 - fmt.bias - exponent);
    const shift = Math.min(25, 23 - fmt.mantissaBits + below);
    let kept = significand >> shift;
    const rest = significand & ((1 << shift) - 1);
    const half = 1 << (shift - 1);
    if (rest > half || (rest === half && kept & 1)) kept += 1;
    const field = (Math.max(1, exponent + fmt.bias) - 1) << fmt.mantissaBits;
    const code = Math.min(field + kept, fmt.largestCode);
    // E2M1's conversion gives -0 the code of +0.
    const negative = fmt === E2M1 ? magnitude !== 0 && word >>> 31 : word >>> 31;
    return negative ? code | (1 << (fmt.bits - 1)) : code;
  }

  /** x · scale as a code, both fp32: one fp32 rounding, then the conversion. In FP8 an infinite x becomes NaN. */
  function cast(x, scale, fmt) {
    if (fmt !== E2M1 && !Number.isFinite(x)) return fmt.nanCode;
    return encode(Math.fround(x * scale), fmt);
  }

  /** The E8M0 code of the smallest power of two that is not below x >= 0; NaN is 0xFF. */
  function e8m0Above(x) {
    if (Number.isNaN(x)) return E8M0.nanCode;
    const word = wordOf(x);
    const exponent = word >>> 23;
    const mantissa = word & 0x7fffff;
    // A subnormal x of up to half the smallest normal number is covered by 2^-127.
    const up = mantissa > 0 && !(exponent === 0 && mantissa <= 0x400000);
    return Math.min(exponent + (up ? 1 : 0), E8M0.largestCode);
  }

  /** How an fp32 x becomes a code: {code, value, rule, lower, upper}; lower and upper are magnitudes around |x|.

      rule: "exact", "nearest", "tie", "saturated" (beyond the largest), "up" (E8M0 never rounds down), "nan". */
  function rounding(x, fmt) {
    const scales = fmt === E8M0;
    const size = Math.abs(x);
    const code = scales ? e8m0Above(size) : cast(x, 1, fmt);
    const value = decode(code, fmt);
    if (Number.isNaN(x) || Number.isNaN(value)) return {code, value, rule: "nan", lower: NaN, upper: NaN};
    const magnitude = scales ? code : code & ((1 << (fmt.bits - 1)) - 1);
    const got = Math.abs(value);
    if (got === size) return {code, value, rule: "exact", lower: got, upper: got};
    if (got < size && magnitude === fmt.largestCode) {
      return {code, value, rule: "saturated", lower: got, upper: Infinity};
    }
    const lower = got < size ? got : magnitude === 0 || (scales && code === 0) ? 0 : decode(magnitude - 1, fmt);
    const upper = got < size ? decode(magnitude + 1, fmt) : got;
    if (scales) return {code, value, rule: "up", lower, upper};
    return {code, value, rule: size - lower === upper - size ? "tie" : "nearest", lower, upper};
  }

  /** What the cast of fp32 numbers lost: counts, and the SQNR in dB (float64 sums, in order).

      As twin::cast_stats: saturated and underflowed count finite x, x' = value · scale_inv with scale_inv = 1 / scale
      in fp32. An order of addition is no matter for two digits of a dB, so the sums are plain. */
  function castStats(xs, scale, fmt) {
    const inverse = Math.fround(1 / scale);
    const most = limit(fmt) * inverse;
    let [saturated, underflowed, signal, noise] = [0, 0, 0, 0];
    for (const x of xs) {
      if (!Number.isFinite(x)) continue;
      const value = decode(cast(x, scale, fmt), fmt);
      if (Math.abs(x) > most) saturated += 1;
      if (x !== 0 && value === 0) underflowed += 1;
      const error = x - value * inverse;
      signal += x * x;
      noise += error * error;
    }
    return {saturated, underflowed, signal, noise, sqnr: 10 * Math.log10(signal / noise)};
  }

  // ---- the tensor core --------------------------------------------------------------------------------------------

  const FRACTION = 13; // fraction bits below 2^emax, and of the result
  const LOWEST = -133; // of emax
  const NAN_WORD = 0x7fffffff;
  const INF_WORD = 0x7f800000;

  /** Each code's exponent and integer significand; value = ± significand · 2^(exponent - mantissaBits). */
  function operands(fmt) {
    const count = 1 << fmt.bits;
    const exponent = new Int32Array(count);
    const significand = new Int32Array(count);
    for (let code = 0; code < count; code++) {
      const part = fields(code, fmt);
      exponent[code] = Math.max(part.exponent, 1) - fmt.bias;
      const finite = Number.isFinite(part.value);
      significand[code] = finite ? (part.exponent > 0 ? 1 << fmt.mantissaBits : 0) + part.mantissa : 0;
    }
    return {exponent, significand};
  }

  const decoded = new Map([E4M3, E5M2].map((fmt) => [fmt, operands(fmt)]));

  /** The word of an infinite or NaN result, or -1 where every number is finite. */
  function special(a, b, cWord, aFormat, bFormat) {
    const cSize = cWord & 0x7fffffff;
    let nan = cSize > INF_WORD;
    let plus = cWord === INF_WORD;
    let minus = cWord === (INF_WORD | 0x80000000) >>> 0;
    for (let k = 0; k < a.length; k++) {
      const product = decode(a[k], aFormat) * decode(b[k], bFormat); // inf · 0 is NaN here, too
      nan ||= Number.isNaN(product);
      plus ||= product === Infinity;
      minus ||= product === -Infinity;
    }
    if (nan || (plus && minus)) return NAN_WORD;
    return plus ? INF_WORD : minus ? (INF_WORD | 0x80000000) >>> 0 : -1;
  }

  /** The fp32 word of total · 2^unit, cut toward zero to 13 fraction bits; +0 for a zero total. */
  function resultWord(total, unit) {
    const magnitude = Math.abs(total);
    const exponent = unit + 31 - Math.clz32(magnitude);
    // The lowest bit kept is 13 below the leading one, or below 2^-126 if that is higher.
    const lowest = Math.max(Math.max(exponent, -126) - FRACTION, unit);
    const kept = magnitude >>> Math.min(lowest - unit, 31);
    if (kept === 0) return 0;
    const value = kept * 2 ** lowest; // on fp32's grid; 2^128 and more become infinite
    return wordOf(total < 0 ? -value : value);
  }

  /** One FP8 instruction, D = a · b + c: up to 32 codes a and b, and the word of an fp32 c.

      1. A product's exponent is the sum of both exponents. Its significand, in [0, 4), is not renormalised.
      2. emax is the largest exponent of the nonzero terms, c included.
      3. Each term is cut toward zero to multiples of 2^(emax - 13).
      4. The cut terms are added exactly.
      5. The sum is cut toward zero to 13 fraction bits.

      Returns {word, emax, unit, total, special, exponent, significand, power, kept}. Term k is significand[k] ·
      2^power[k], and what is left of it kept[k] · 2^unit; the last term is c. total is the sum of kept. special says
      that a NaN or an infinity decided. emax is the largest of exponent where significand is not 0. */
  function step(a, b, cWord, aFormat = E4M3, bFormat = E4M3) {
    const count = a.length + 1;
    const exponent = new Int32Array(count);
    const significand = new Int32Array(count);
    const power = new Int32Array(count);
    const kept = new Int32Array(count);
    const [left, right] = [decoded.get(aFormat), decoded.get(bFormat)];
    const mantissaBits = aFormat.mantissaBits + bFormat.mantissaBits;
    let emax = LOWEST;
    for (let k = 0; k < count - 1; k++) {
      const size = left.significand[a[k]] * right.significand[b[k]];
      exponent[k] = left.exponent[a[k]] + right.exponent[b[k]];
      significand[k] = (a[k] ^ b[k]) & 0x80 ? -size : size;
      power[k] = exponent[k] - mantissaBits;
      if (size !== 0 && exponent[k] > emax) emax = exponent[k];
    }
    const field = (cWord >>> 23) & 0xff;
    const cSize = field === 255 ? 0 : (field > 0 ? 0x800000 : 0) + (cWord & 0x7fffff);
    exponent[count - 1] = Math.max(field, 1) - 127;
    significand[count - 1] = cWord >>> 31 ? -cSize : cSize;
    power[count - 1] = exponent[count - 1] - 23;
    if (cSize !== 0 && exponent[count - 1] > emax) emax = exponent[count - 1];

    const unit = emax - FRACTION;
    let total = 0;
    for (let k = 0; k < count; k++) {
      const size = Math.abs(significand[k]);
      const shift = power[k] - unit;
      const cut = shift >= 0 ? size << Math.min(shift, 25) : size >> Math.min(-shift, 31);
      kept[k] = significand[k] < 0 ? -cut : cut;
      total += kept[k];
    }
    const found = special(a, b, cWord, aFormat, bFormat);
    const word = found === -1 ? resultWord(total, unit) : found;
    return {word, emax, unit, total, special: found !== -1, exponent, significand, power, kept};
  }

  /** A chain of steps over any K, each from the word of the step before. */
  function chain(a, b, cWord, aFormat = E4M3, bFormat = E4M3) {
    let word = cWord;
    for (let k = 0; k < a.length; k += 32) {
      word = step(a.subarray(k, k + 32), b.subarray(k, k + 32), word, aFormat, bFormat).word;
    }
    return word;
  }

  // ---- random numbers ---------------------------------------------------------------------------------------------

  /** The high 32 bits of a product of two 32-bit words. */
  function highProduct(x, y) {
    const [xl, xh, yl, yh] = [x & 0xffff, x >>> 16, y & 0xffff, y >>> 16];
    const middle = xh * yl + ((xl * yl) >>> 16); // below 2^32, as every product of two halves plus a half
    return (xh * yh + (middle >>> 16) + (((middle & 0xffff) + xl * yh) >>> 16)) >>> 0;
  }

  /** Philox4x32-10: the four words of element i < 2^32 under a seed below 2^32, with offset 0. */
  function philox(i, seed) {
    let [c0, c1, c2, c3] = [i >>> 0, 0, 0, 0];
    let [k0, k1] = [seed >>> 0, 0];
    for (let round = 0; round < 10; round++) {
      const [high0, low0] = [highProduct(0xd2511f53, c0), Math.imul(0xd2511f53, c0)];
      const [high1, low1] = [highProduct(0xcd9e8d57, c2), Math.imul(0xcd9e8d57, c2)];
      [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1 >>> 0, (high0 ^ c3 ^ k1) >>> 0, low0 >>> 0];
      k0 = (k0 + 0x9e3779b9) >>> 0;
      k1 = (k1 + 0xbb67ae85) >>> 0;
    }
    return [c0, c1, c2, c3];
  }

  // Wichura's AS241 (PPND16), numerator and denominator, highest power first: the centre, the tail, the far tail.
  const CENTRE = [
    [2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
      1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0],
    [5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
      5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0],
  ];
  const TAIL = [
    [7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
      3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0],
    [1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
      6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0],
  ];
  const FAR_TAIL = [
    [2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
      2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0],
    [2.04426310337993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
      1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0],
  ];
  const LOG_SERIES = Array.from({length: 12}, (_, i) => 1 / (2 * (11 - i) + 1));
  const LN2 = 0.6931471805599453;
  const SQRT2 = 1.4142135623730951;

  const horner = (coefficients, x) => coefficients.reduce((total, coefficient) => total * x + coefficient);
  const ratio = (piece, x) => horner(piece[0], x) / horner(piece[1], x);
  const view = new DataView(new ArrayBuffer(8));

  /** The natural logarithm of a positive normal float64 from + - * / alone: Math.log differs between machines. */
  function log(x) {
    view.setFloat64(0, x);
    const top = view.getUint32(0);
    let exponent = (top >>> 20) - 1023;
    view.setUint32(0, (top & 0xfffff) | 0x3ff00000);
    let mantissa = view.getFloat64(0);
    if (mantissa > SQRT2) [mantissa, exponent] = [mantissa * 0.5, exponent + 1];
    const s = (mantissa - 1) / (mantissa + 1);
    return exponent * LN2 + 2 * (s * horner(LOG_SERIES, s * s));
  }

  /** The number that a standard normal variable stays below with probability p. */
  function quantile(p) {
    const q = p - 0.5;
    if (Math.abs(q) <= 0.425) return q * ratio(CENTRE, 0.180625 - q * q);
    const distance = Math.sqrt(-log(Math.min(p, 1 - p)));
    const tail = distance > 5 ? ratio(FAR_TAIL, distance - 5) : ratio(TAIL, distance - 1.6);
    return q < 0 ? -tail : tail;
  }

  /** `count` standard normal numbers of a seed, each rounded once to fp32. */
  function normal(count, seed) {
    return Float32Array.from({length: count}, (_, i) => {
      const words = philox(i, seed);
      return quantile((words[0] * 2 ** 20 + (words[1] >>> 12) + 0.5) * 2 ** -52);
    });
  }

  return {
    E4M3, E5M2, E8M0, E2M1, FORMATS, FRACTION, NAN_WORD,
    wordOf, numberOf, hex, bytesOf, g,
    fields, decode, largest, limit, encode, cast, e8m0Above, rounding, castStats,
    step, chain, philox, normal,
  };
}

const numbers = makeNumbers();
