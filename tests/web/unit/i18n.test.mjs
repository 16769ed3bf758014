import assert from "node:assert/strict"
import fs from "node:fs"
import { test } from "node:test"
import { ENGLISH, SECTION, Texts, fill, flatten } from "../../../web/i18n.js"

const root = new URL("../../../", import.meta.url)
const locale = (name) => flatten(JSON.parse(fs.readFileSync(new URL(`locales/${name}/main.json`, root), "utf8"))[SECTION])
/** The page's own texts: the server's sentences bring their English along. */
const ofThePage = (name) => Object.fromEntries(Object.entries(locale(name)).filter(([key]) => !key.startsWith("message.")))
const placeholders = (text) => [...text.matchAll(/\{(\w+)\}/g)].map((m) => m[1]).sort()

test("the English locale file and the built-in English are the same", () => {
  assert.deepEqual(ofThePage("en"), { ...ENGLISH })
})

test("Chinese has every text, with the same placeholders", () => {
  const [en, zh] = [locale("en"), locale("zh")]
  assert.deepEqual(Object.keys(zh).sort(), Object.keys(en).sort())
  for (const [key, text] of Object.entries(en)) assert.deepEqual(placeholders(zh[key]), placeholders(text), key)
})

test("every text that the code asks for exists, and every text is asked for", () => {
  const code = fs.readdirSync(new URL("web/", root)).filter((f) => f.endsWith(".js") && f !== "i18n.js")
  const source = code.map((f) => fs.readFileSync(new URL(`web/${f}`, root), "utf8")).join("\n")
  // Built from a verdict's, a column's, a mode's name; lists are asked for by i18n.js itself.
  const prefixes = ["verdict.", "table.", "list.", "state.muted", "state.bypassed"]
  for (const key of Object.keys(ENGLISH)) {
    assert.ok(source.includes(`"${key}"`) || prefixes.some((p) => key.startsWith(p)), `${key} is unused`)
  }
  const asked = source.matchAll(/"((?:panel|button|hint|chart|headline|fact|action|setup|count|state|block|remark|refused|note|toast|list)\.\w+)"/g)
  for (const [, key] of asked) assert.ok(key in ENGLISH, `${key} has no text`)
})

test("placeholders are filled, the unknown stay", () => {
  assert.equal(fill("{a} of {b} {c}", { a: 1, b: "<b>" }), "1 of <b> {c}")
  assert.equal(fill("{constructor}", {}), "{constructor}")
})

test("a text falls back to the base language, then to English, then to its key", () => {
  const texts = new Texts()
  texts.load({ zh: { [SECTION]: { state: { done: "完成" } } }, fr: null, de: {} })
  texts.locale = "zh-TW"
  assert.equal(texts.t("state.done"), "完成")
  assert.equal(texts.t("state.idle"), "idle")
  assert.equal(texts.t("no.such"), "no.such")
  texts.locale = undefined
  assert.equal(texts.t("state.done"), "done")
  texts.load(null)
})

test("a sentence of the server in the reader's language, else the English that came with it", () => {
  const texts = new Texts()
  const message = {
    en: { reason: "{blocks} out of range", rescue: "Step {step}: {reason}." },
    zh: { reason: "{blocks} 超出范围", rescue: "第 {step} 步：{reason}。" },
  }
  for (const language of ["en", "zh"]) texts.load({ [language]: { [SECTION]: { message: message[language], list: { comma: "、" } } } })
  const said = { key: "rescue", values: { step: 3, reason: { key: "reason", values: { blocks: ["layer.0", "layer.1"] } } }, text: "English." }
  texts.locale = "zh-TW"
  assert.equal(texts.say(said), "第 3 步：layer.0、layer.1 超出范围。")
  assert.equal(texts.say({ ...said, key: "unknown" }), "English.")
  assert.equal(texts.say({ key: "constructor", text: "English." }), "English.")
  texts.locale = "fr"
  assert.equal(texts.say(said), "Step 3: layer.0、layer.1 out of range.".replace("、", ", "))
})
