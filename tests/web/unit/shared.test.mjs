// What the server and the page have to agree on: the level of every block of a set of reports, and every message in
// both languages. tests/unit/test_report.py holds the server, the chart and the client to the same files.

import assert from "node:assert/strict"
import fs from "node:fs"
import { test } from "node:test"
import { SECTION, Texts } from "../../../web/i18n.js"
import { OUTCOMES, normalise, normaliseMessage } from "../../../web/report.js"
import { blockLines, remarks } from "../../../web/words.js"

const root = new URL("../../../", import.meta.url)
const read = (path) => JSON.parse(fs.readFileSync(new URL(path, root), "utf8"))
const levels = read("tests/data/report_levels.json")
const stored = Object.fromEntries(Object.keys(levels).map((name) => [name, read(`tests/data/reports/${name}.json`)]))

const texts = new Texts()
texts.load({ en: read("locales/en/main.json"), zh: read("locales/zh/main.json") })

function inLanguage(locale, act) {
  texts.locale = locale
  try {
    return act()
  } finally {
    texts.locale = "en"
  }
}

for (const [name, wanted] of Object.entries(levels)) {
  test(`the page shows the blocks of ${name} at the level that the report gives`, () => {
    const { report, refusal, notes } = normalise(stored[name])
    assert.equal(refusal, null)
    assert.deepEqual(notes, [])
    assert.deepEqual(report.blocks.map((block) => block.level), wanted)
    assert.equal(report.outcome, stored[name].outcome)
    assert.ok(OUTCOMES.includes(report.outcome))
    for (const block of report.blocks) assert.ok(blockLines(block, report, texts.t).length > 1)
  })
}

test("every message is said in English as the server says it", () => {
  for (const sample of read("tests/data/messages.json")) {
    assert.equal(texts.say(normaliseMessage(sample)).trim(), sample.text, sample.key)
  }
})

test("every message is said in Chinese, with all that fills it", () => {
  // What stays as it is in Chinese: names, numbers, code.
  const kept = /\b[a-z]+_[a-z_]+\b|ComfyUI|post-CFG|CFG|MOSS-Image|MOSS FP16|FP16|NaN|Inf|Latent|LoRA|MODEL|fp16|fp32_residual|fp32|c\/2|eps|stock|exact|\bc\b|\bo\b|ffn_down|report|fix|guard|auto|rescue|engine|managed|builtin|native/g
  for (const sample of read("tests/data/messages.json")) {
    const said = inLanguage("zh", () => texts.say(normaliseMessage(sample)))
    assert.ok(!/[{}]/.test(said), `${sample.key}: ${said}`)
    if (sample.key === "error") continue // an exception's own words
    assert.notEqual(said, sample.text, sample.key)
    assert.match(said, /[\u4e00-\u9fff]/, sample.key)
    for (const value of plainValues(sample.values)) assert.ok(said.includes(value), `${sample.key} lost ${value}: ${said}`)
    const words = plainValues(sample.values).filter((value) => !/^\d+$/.test(value)) // a 6 is in FP16 as well
    const longestFirst = words.sort((a, b) => b.length - a.length)
    const rest = longestFirst.reduce((words, value) => words.replaceAll(value, ""), said)
    assert.ok(!/[a-z]{3,}/i.test(rest.replace(kept, "").replace(/--(mode|dtype|c)\b/g, "")), `${sample.key}: English left in ${said}`)
  }
})

test("the remarks of every report are in the reader's language", () => {
  for (const name of Object.keys(levels)) {
    const { report } = normalise(stored[name])
    const view = { phase: report.state, notes: [], report, error: null }
    const said = (locale) => inLanguage(locale, () => remarks(view, texts).map(({ text }) => text))
    const [english, chinese] = [said("en"), said("zh")]
    assert.equal(english.length, chinese.length, name)
    chinese.forEach((words, place) => assert.notEqual(words, english[place], name))
  }
})

/** The texts and numbers that fill a message, those of the messages among them too. */
function plainValues(values) {
  return Object.values(values).flatMap((value) => {
    if (Array.isArray(value)) return value.flatMap((item) => plainValues({ item }))
    return typeof value === "object" ? plainValues(value.values) : [String(value)]
  }).filter((value) => value !== "")
}
