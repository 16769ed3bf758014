// Numbers to text. Pure functions; what they return is set as text, never as HTML.

const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹"

/** 12 -> "2¹²". */
export function powerOfTwo(exponent) {
  const digits = [...String(Math.abs(exponent))].map((d) => SUPERSCRIPT[Number(d)] ?? d).join("")
  return `2${exponent < 0 ? "⁻" : ""}${digits}`
}

const THIN = "\u202f" // narrow and never broken at the end of a line

/** A number with its thousands apart from five digits on: 296960 -> "296 960", 4096 -> "4096". */
export function grouped(text) {
  const [whole, ...rest] = String(text).split(".")
  if (whole.length < 5) return String(text)
  return [whole.replace(/\B(?=(\d{3})+(?!\d))/g, THIN), ...rest].join(".")
}

/** A peak in a sentence: 15008.3 -> "15 008", 812.4 -> "812", 0.0123 -> "0.012", 3.4e38 -> "3.4e38". */
export function peak(value) {
  if (value === Infinity) return "∞"
  if (typeof value !== "number" || !Number.isFinite(value)) return "–"
  if (value === 0) return "0"
  const size = Math.abs(value)
  if (size >= 1e7 || size < 1e-3) return value.toExponential(1).replace("e+", "e")
  return size >= 100 ? grouped(Math.round(value)) : String(Number(value.toPrecision(2)))
}

/** A peak in full, for a tooltip or a table: up to seven significant digits (fp32 has no more). */
export function exact(value) {
  if (value === Infinity) return "∞"
  if (typeof value !== "number" || !Number.isFinite(value)) return "–"
  const short = String(Number(value.toPrecision(7)))
  return short.includes("e") ? short : grouped(short)
}

/** A tick of the axis, 2^exponent: a plain number as far as that is short, "2¹⁷" beyond. */
export function tick(exponent) {
  return exponent >= 0 && exponent <= 16 ? String(2 ** exponent) : powerOfTwo(exponent)
}

/** Headroom in bits: one decimal, two below one bit; a real minus sign. "–" for none, "−∞" for a peak not finite. */
export function bits(value) {
  if (value === -Infinity) return "−∞"
  if (typeof value !== "number" || !Number.isFinite(value)) return "–"
  const size = Math.abs(value)
  // A little room must not read as none.
  const digits = size >= 0.995 ? size.toFixed(1) : size >= 0.01 || size === 0 ? size.toFixed(2) : size.toPrecision(1)
  return value < 0 ? `−${digits}` : digits
}

/** A count, short enough for a status line: 12345 -> "12k". The table shows it in full. */
export function count(value) {
  if (!Number.isFinite(value)) return "–"
  if (value < 10_000) return String(value)
  const units = ["k", "M", "G", "T", "P"]
  let scaled = value
  let unit = -1
  while (scaled >= 1000 && unit < units.length - 1) [scaled, unit] = [scaled / 1000, unit + 1]
  const digits = scaled < 10 ? Math.floor(scaled * 10) / 10 : Math.floor(scaled)
  return `${digits}${units[unit]}`
}

/** A factor as people write it: 0.0625 -> "1/16", 1 -> "1", 0.3 -> "0.3". */
export function factor(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "?"
  const exponent = Math.log2(value)
  if (value > 0 && value < 1 && Number.isInteger(exponent)) return `1/${2 ** -exponent}`
  return String(Number(value.toPrecision(4)))
}

/** A factor per block or one for all: [1/16, 1/16] -> "1/16"; a mixed list -> "1/64…1/16". */
export function factors(values) {
  const list = (Array.isArray(values) ? values : [values]).filter((v) => typeof v === "number" && Number.isFinite(v))
  if (list.length === 0) return "?"
  const low = Math.min(...list)
  const high = Math.max(...list)
  return low === high ? factor(low) : `${factor(low)}…${factor(high)}`
}
