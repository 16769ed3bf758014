// Numbers to places: the log2 axis, the bars, and the doublings left under the fp16 maximum. Pure functions.

/** The largest finite fp16 number. */
export const FP16_MAX = 65504
export const FP16_MAX_LOG2 = Math.log2(FP16_MAX)

/** The levels a block can have, as the server gives them; a later one is worse. `none`: the report gives no level. */
export const LEVELS = Object.freeze(["none", "ok", "low", "saturated", "not_finite"])

/** log2(65504 / maxAbs); null where there is nothing to divide by, -Infinity for a peak that is not finite. */
export function headroomBits(maxAbs) {
  if (maxAbs === Infinity) return -Infinity
  if (typeof maxAbs !== "number" || !(maxAbs > 0)) return null
  return FP16_MAX_LOG2 - Math.log2(maxAbs)
}

/** The worst level of several. */
export function worstLevel(levels) {
  return levels.reduce((worst, level) => (LEVELS.indexOf(level) > LEVELS.indexOf(worst) ? level : worst), "none")
}

/**
 * The log2 axis of a set of peaks: {low, high, ticks}, in powers of two. It always shows the fp16 maximum with a
 * whole axis under it, 2^0 .. 2^16, so that two reports can be compared by eye.
 */
export function axis(peaks) {
  const logs = peaks.filter((p) => Number.isFinite(p) && p > 0).map((p) => Math.log2(p))
  const lowest = logs.length ? Math.min(...logs) : 0
  const highest = logs.length ? Math.max(...logs) : 0
  const low = lowest < 0 ? Math.max(-24, Math.floor(lowest) - 1) : 0
  const high = Math.min(128, Math.max(16, Math.ceil(highest)))
  const step = high - low > 24 ? 8 : 4
  const ticks = []
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick)
  return { low, high, ticks }
}

/** A linear map of [low, high] to [from, to], held inside it. */
export function project(value, low, high, from, to) {
  if (!(high > low)) return from
  const share = Math.min(1, Math.max(0, (value - low) / (high - low)))
  return from + share * (to - from)
}

/**
 * The bars' places: one band per block, the text blocks apart from the joint blocks.
 * Returns [{x, width}] in pixels, within [0, width].
 */
export function bands(groups, width) {
  const total = groups.reduce((sum, n) => sum + n, 0)
  if (total === 0 || !(width > 0)) return []
  const gaps = groups.filter((n) => n > 0).length - 1
  const band = width / (total + gaps * 0.8)
  const places = []
  let x = 0
  for (const count of groups) {
    if (count === 0) continue
    for (let i = 0; i < count; i++, x += band) places.push({ x, width: band })
    x += band * 0.8
  }
  return places
}

/** The index of the band under x, or the nearest one; -1 for none. */
export function bandAt(places, x) {
  let best = -1
  let distance = Infinity
  places.forEach((place, index) => {
    const away = Math.abs(x - (place.x + place.width / 2))
    if (away < distance) [best, distance] = [index, away]
  })
  return best
}
