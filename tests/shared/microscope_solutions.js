/* One solution of each puzzle of the microscope, for its tests. */
const solutions = (() => {
  function decode(code) {
    const [sign, exponent, mantissa] = [code >> 7, (code >> 3) & 15, code & 7];
    if (exponent === 15 && mantissa === 7) return NaN;
    const value = exponent ? (1 + mantissa / 8) * 2 ** (exponent - 7) : (mantissa / 8) * 2 ** -6;
    return sign ? -value : value;
  }

  function even(x) {
    const below = Math.floor(x);
    return x - below === 0.5 ? below + (below & 1) : Math.round(x);
  }

  /** The code of a finite number, given the format's mantissa bits, bias and largest value. */
  function nearest(x, mantissaBits, bias, largest) {
    const sign = x < 0 || Object.is(x, -0) ? 0x80 : 0;
    const size = Math.min(Math.abs(x), largest);
    let exponent = 1 - bias;
    while (size >= 2 ** (exponent + 1)) exponent += 1;
    return sign + ((exponent + bias - 1) << mantissaBits) + even(size / 2 ** (exponent - mantissaBits));
  }

  const encode = (x) => (Number.isFinite(x) ? nearest(x, 3, 7, 448) : 0x7f);

  const quantise = (x, scale) =>
    Uint8Array.from(x, (each) => (Number.isFinite(each) ? nearest(Math.fround(each * scale), 2, 15, 57344) : 0x7f));

  function scale_update(scale, history, fp8_max) {
    const last = history[0];
    if (last === 0) return [scale, history];
    const moved = Float32Array.of(...history.slice(1), last);
    const amax = Math.max(...Array.from(moved).filter(Number.isFinite));
    moved[0] = 0;
    const most = 3.4028234663852886e38;
    return [amax > 0 ? Math.min(Math.fround(fp8_max / amax), most) : scale, moved];
  }

  function bias_gradient(g) {
    const columns = g[0].length;
    const halve = (rows) => {
      while (rows.length > 1) {
        const half = rows.length / 2;
        rows = rows.slice(0, half).map((row, r) => row.map((x, column) => x + rows[r + half][column]));
      }
      return rows[0];
    };
    let total = null;
    for (let first = 0; first < g.length; first += 64) {
      const block = Array.from({length: 64}, (_, r) => g[first + r] ?? new Float32Array(columns));
      const sums = halve([0, 16, 32, 48].map((run) => halve(block.slice(run, run + 16))));
      total = total ? total.map((x, column) => x + sums[column]) : sums;
    }
    return total;
  }

  function term(a, b) {
    const parts = (code) => {
      const exponent = (code >> 3) & 15;
      return [(code >> 7 ? -1 : 1) * (8 * (exponent > 0) + (code & 7)), Math.max(exponent, 1) - 7];
    };
    const [[left, i], [right, j]] = [parts(a), parts(b)];
    return [left * right, i + j];
  }

  function instruction(a, b, c) {
    const terms = a.map((code, k) => {
      const [significand, exponent] = term(code, b[k]);
      return [significand * 2 ** (exponent - 6), exponent];
    });
    const leading = (x) => (x === 0 ? 0 : Math.floor(Math.log2(Math.abs(x)))); // of numbers of few bits: exact
    terms.push([c, leading(c)]);
    const emax = Math.max(...terms.filter(([value]) => value !== 0).map(([, exponent]) => exponent));
    if (!Number.isFinite(emax)) return 0;
    const cut = (x, exponent) => Math.trunc(x / 2 ** (exponent - 13)) * 2 ** (exponent - 13);
    const total = terms.reduce((sum, [value]) => sum + cut(value, emax), 0);
    return cut(total, leading(total)) + 0;
  }

  return {
    "1 decode": decode,
    "2 encode": encode,
    "3 quantise": quantise,
    "4 scale_update": scale_update,
    "5 bias_gradient": bias_gradient,
    "6 term": term,
    "7 instruction": instruction,
  };
})();
