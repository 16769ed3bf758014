// What arrives from the server, made safe to show: every field has a type, and nothing in here throws.

import { LEVELS, headroomBits, worstLevel } from "./scale.js"

export const SCHEMA = "moss_fp16.report/"
export const SCHEMA_VERSION = 1
export const MAX_BLOCKS = 1024
const MAX_TEXT = 400
const MAX_LIST = 64

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value)

/** Any value as one line of text of bounded length. */
export function text(value, fallback = "", limit = MAX_TEXT) {
  if (typeof value !== "string" && typeof value !== "number" && typeof value !== "boolean") return fallback
  const line = String(value).replace(/\s+/g, " ").trim()
  return line.length > limit ? `${line.slice(0, limit - 1)}…` : line
}

/** A whole number >= 0; anything else is the fallback. */
function whole(value, fallback = 0) {
  return typeof value === "number" && Number.isFinite(value) && value >= 0 ? Math.floor(value) : fallback
}

/** A peak: a number >= 0, Infinity for one that is not finite, null where there is none. */
function magnitude(value) {
  const number = typeof value === "string" ? Number(value.replace(/^([+-]?)inf$/i, "$1Infinity")) : value
  if (typeof value === "string" && /nan/i.test(value)) return Infinity
  if (typeof number !== "number") return null
  if (Number.isNaN(number)) return typeof value === "number" ? Infinity : null
  return Math.abs(number)
}

/** What became of the image, as the server judges it. */
export const OUTCOMES = Object.freeze(["ok", "rescued", "saturated", "broken", "unknown"])
const SEVERITIES = new Set(["info", "warn", "error"])

const oneOf = (list, value, fallback) => (list.includes(value) ? value : fallback)

function normaliseBlock(raw, index) {
  const source = isObject(raw) ? raw : {}
  const nonFinite = whole(source.non_finite)
  let maxAbs = magnitude(source.max_abs)
  // JSON has no infinity: an overflow arrives as null.
  if (source.max_abs === null || nonFinite > 0) maxAbs = Infinity
  return {
    name: text(source.name, `#${index}`, 64),
    maxAbs,
    over: whole(source.over),
    saturated: whole(source.saturated),
    clamped: whole(source.clamped),
    nonFinite,
    bits: headroomBits(maxAbs),
    level: oneOf(LEVELS, source.level, "none"),
  }
}

/** What fills a message's placeholders: texts and numbers, lists of them, and messages of their own. */
function messageValue(value, depth) {
  if (Array.isArray(value)) return value.slice(0, MAX_LIST).map((item) => messageValue(item, depth))
  if (isObject(value)) return depth > 3 ? "" : normaliseMessage(value, depth + 1)
  return text(value)
}

/** A sentence off the wire: {key, values, severity, text}, `text` being the English of it. */
export function normaliseMessage(raw, depth = 0) {
  if (!isObject(raw)) return { key: "", values: {}, severity: "warn", text: text(raw) }
  const values = isObject(raw.values) ? raw.values : {}
  return {
    key: text(raw.key, "", 64),
    values: Object.fromEntries(Object.entries(values).map(([name, value]) => [name, messageValue(value, depth)])),
    severity: SEVERITIES.has(raw.severity) ? raw.severity : "warn",
    text: text(raw.text),
  }
}

function normaliseRemedy(raw) {
  if (!isObject(raw)) return null
  const action = isObject(raw.action) ? raw.action : null
  const usable = action && ["input", "value"].every((name) => typeof action[name] === "string" && action[name] !== "")
  return { ...normaliseMessage(raw), action: usable ? { input: text(action.input), value: text(action.value) } : null }
}

function normaliseRescue(raw) {
  if (!isObject(raw)) return { step: null, sigma: null, rung: text(raw), reason: normaliseMessage("") }
  return {
    step: typeof raw.step === "number" && Number.isFinite(raw.step) ? raw.step : null,
    sigma: typeof raw.sigma === "number" && Number.isFinite(raw.sigma) ? raw.sigma : null,
    rung: text(raw.rung),
    reason: normaliseMessage({ key: raw.reason_key, values: raw.reason_values, text: raw.reason }),
  }
}

function normaliseFactors(raw) {
  const source = isObject(raw) ? raw : {}
  const list = (value) =>
    (Array.isArray(value) ? value : [value]).filter((v) => typeof v === "number" && Number.isFinite(v))
  const of = (from) => ({ c: list(from.c), sAttn: list(from.s_attn), sFfn: list(from.s_ffn) })
  return {
    ...of(source),
    eps: text(source.eps),
    clamp: typeof source.clamp === "number" && Number.isFinite(source.clamp) ? source.clamp : null,
    baked: isObject(source.baked) ? of(source.baked) : null,
  }
}

function schemaVersion(schema) {
  if (typeof schema !== "string" || !schema.startsWith(SCHEMA)) return null
  const version = Number.parseInt(schema.slice(SCHEMA.length), 10)
  return Number.isFinite(version) ? version : null
}

const sum = (blocks, field) => blocks.reduce((total, block) => total + block[field], 0)

/** The block nearest to overflow: the first of the largest peak, or the first that overflowed. */
export function nearest(blocks) {
  let worst = null
  for (const block of blocks) {
    if (block.maxAbs !== null && (worst === null || block.maxAbs > worst.maxAbs)) worst = block
  }
  return worst
}

/**
 * A report off the wire -> {report, refusal, notes}.
 * `report` is null where nothing can be shown, and `refusal` is then the key of the sentence that says why;
 * `notes` are keys of sentences about what was odd but could be shown. `report.raw` is what copy and save hand on.
 */
export function normalise(raw) {
  if (!isObject(raw)) return { report: null, refusal: "refused.notObject", notes: [] }
  const version = schemaVersion(raw.schema)
  if (version === null && !Array.isArray(raw.blocks)) return { report: null, refusal: "refused.notReport", notes: [] }
  if (!Array.isArray(raw.blocks)) {
    return { report: null, refusal: version > SCHEMA_VERSION ? "refused.newer" : "refused.noBlocks", notes: [] }
  }
  const notes = []
  if (version === null) notes.push("note.noSchema")
  else if (version > SCHEMA_VERSION) notes.push("note.newer")
  if (raw.blocks.length > MAX_BLOCKS) notes.push("note.truncated")

  const streamDtype = text(raw.stream_dtype, "", 32)
  const limited = !/^(fp32|float32|bf16|bfloat16)$/.test(streamDtype)
  const blocks = raw.blocks.slice(0, MAX_BLOCKS).map((block, index) => normaliseBlock(block, index))
  const rescues = (Array.isArray(raw.rescues) ? raw.rescues : []).slice(0, MAX_LIST).map(normaliseRescue)
  // A report made without a page in mind has the English sentences alone.
  const said = Array.isArray(raw.messages) ? raw.messages : Array.isArray(raw.warnings) ? raw.warnings : []
  const messages = said.slice(0, MAX_LIST).map((message) => normaliseMessage(message))
  const check = isObject(raw.self_check) ? raw.self_check : null
  const report = {
    raw,
    nodeId: text(raw.node_id, "", 64),
    mode: text(raw.mode, "?", 32),
    engine: text(raw.engine, "?", 32),
    computeDtype: text(raw.compute_dtype, "?", 32),
    streamDtype,
    limited,
    factors: normaliseFactors(raw.factors),
    modelCalls: whole(raw.model_calls),
    blocks,
    rescues,
    messages: messages.filter((message) => message.key !== "" || message.text !== ""),
    remedy: normaliseRemedy(raw.remedy),
    outcome: oneOf(OUTCOMES, raw.outcome, "unknown"),
    cause: isObject(raw.verdict?.values?.cause) ? normaliseMessage(raw.verdict.values.cause) : null,
    error: isObject(raw.error) ? normaliseMessage(raw.error) : null,
    threshold: magnitude(raw.threshold),
    selfCheck: check ? { result: text(check.result), detail: text(check.detail) } : null,
    state: text(raw.state, "", 32),
    step: whole(raw.step, whole(raw.steps)),
    totalSteps: whole(raw.total_steps),
    cached: raw.cached === true,
    peak: nearest(blocks),
    saturated: sum(blocks, "saturated"),
    clamped: sum(blocks, "clamped"),
    nonFinite: sum(blocks, "nonFinite"),
    level: worstLevel(blocks.map((block) => block.level)),
  }
  return { report, refusal: null, notes }
}

/** How many blocks lead the list as text-refiner blocks. */
export function textBlocks(blocks) {
  const first = blocks.findIndex((block) => !block.name.startsWith("text"))
  return first === -1 ? blocks.length : first
}
