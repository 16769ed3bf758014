// Which panel shows what: two reporting nodes, queued prompts in turn, other workflows, languages, help.

import assert from "node:assert/strict"
import { after, before, describe, test } from "node:test"
import { EXAMPLES, Page, PACK, URL_BASE, example, getJson, until } from "./comfy.mjs"

const values = (steps, seed) => ({
  MossFP16Loader: { model_name: "hot.safetensors", compute_dtype: "fp16", self_check: false },
  EmptyFlux2LatentImage: { width: 64, height: 64 },
  KSampler: { steps, seed },
})
const NODES = ["MossFP16Loader", "MossFP16Fix", "MossFP16Report", "MossFP16Probe", "MossFP16Export", "MossFP16Compare", "MossFP16SaveConditioning", "MossFP16LoadConditioning"]

describe("two reporting nodes and queued prompts", () => {
  let page, ids, fixed
  before(async () => {
    page = await Page.open({ width: 1900, height: 1200 })
    ids = await page.workflow(example(EXAMPLES.headless), values(3, 11))
    // A Fix node with a factor of its own between the loader and a second sampler.
    fixed = await page.page.evaluate(() => {
      const graph = window.app.rootGraph
      const of = (type) => graph.nodes.find((n) => n.type === type)
      const make = (type, y, from) => {
        const node = from ? from.clone() : window.LiteGraph.createNode(type)
        node.pos = [0, y]
        graph.add(node)
        return node
      }
      const [loader, sampler, saver] = ["MossFP16Loader", "KSampler", "SaveLatent"].map(of)
      const fix = make("MossFP16Fix", 1200)
      fix.widgets.find((w) => w.name === "c").value = "1/64"
      fix.widgets.find((w) => w.name === "self_check").value = false
      const second = make("", 1900, sampler)
      second.widgets.find((w) => w.name === "steps").value = 5
      const save = make("", 2400, saver)
      loader.connect(0, fix, "model")
      fix.connect(0, second, "model")
      for (const name of ["positive", "negative", "latent_image"]) {
        const [source, slot] = [sampler.getInputNode(sampler.findInputSlot(name)), sampler.getInputLink(sampler.findInputSlot(name)).origin_slot]
        source.connect(slot, second, name)
      }
      second.connect(0, save, 0)
      return String(fix.id)
    })
  })
  after(() => page?.close())

  test("each shows its own run", async () => {
    const loader = page.panel(ids.MossFP16Loader[0])
    const fix = page.panel(fixed)
    await page.show(ids.MossFP16Loader[0])
    await page.history(await page.queue())
    assert.equal(await loader.until((s) => s.startsWith("done"), "loader"), "done, 3 steps")
    assert.match(await loader.setup(), /c\u00a01\/16/)
    await page.show(fixed)
    assert.equal(await fix.until((s) => s.startsWith("done"), "fix"), "done, 5 steps")
    assert.match(await fix.setup(), /c\u00a01\/64/)
    assert.notEqual(await fix.text("fact"), await loader.text("fact"))
  })

  test("two queued prompts run in turn: the panel is cleared in between and ends on the second", async () => {
    const steps = (n, seed) =>
      page.page.evaluate(([n, seed]) => {
        const node = window.app.rootGraph.nodes.find((x) => x.type === "KSampler" && x.outputs[0].links?.length > 0)
        node.widgets.find((w) => w.name === "steps").value = n
        node.widgets.find((w) => w.name === "seed").value = seed
      }, [n, seed])
    const loader = page.panel(ids.MossFP16Loader[0])
    await page.show(ids.MossFP16Loader[0])
    await steps(6, 21)
    const first = await page.queue()
    await steps(7, 22)
    const second = await page.queue()
    const seen = await loader.watch((state) => state === "done, 7 steps")
    await page.history(second)
    const ends = seen.map((state) => state.replace(/^queued · /, ""))
    const order = ["done, 3 steps", "done, 6 steps", "done, 7 steps"].map((state) => ends.indexOf(state)).filter((i) => i >= 0)
    assert.deepEqual(order, [...order].sort((a, b) => a - b), seen.join(" | "))
    assert.ok(seen.some((state) => / of 7$|^run started$/.test(state)), seen.join(" | "))
    const entry = await getJson(`/moss_fp16/reports/${ids.MossFP16Loader[0]}`)
    assert.equal(entry.prompt_id, second)
    assert.notEqual(first, second)
  })

  test("another workflow in another tab has its own panels, and coming back finds the old ones", async () => {
    const before = await page.page.evaluate(() => window.app.rootGraph.serialize())
    await page.workflow(example(EXAMPLES.headless), values(3, 11))
    await page.show(ids.MossFP16Loader[0])
    await page.panel(ids.MossFP16Loader[0]).until((s) => s === "idle", "the new workflow")
    await page.page.evaluate((json) => window.app.loadGraphData(json, true, true, null), before)
    await page.show(ids.MossFP16Loader[0])
    assert.equal(await page.panel(ids.MossFP16Loader[0]).until((s) => s !== "idle", "back"), "done, 7 steps")
  })

  test("nothing went wrong in our files", () => page.assertClean())
})

describe("languages and help", () => {
  let page
  before(async () => {
    page = await Page.open({ locale: "zh" })
  })
  after(() => page?.close())

  test("Chinese: names, inputs and the panel", async () => {
    const { ids } = await page.place([["MossFP16Loader", 300], ["MossFP16Report", 400]])
    await page.show(ids[1])
    const panel = page.panel(ids[1])
    await panel.until((s) => s === "空闲", "Chinese")
    const shown = await page.page.evaluate(() => {
      const { MossFP16Loader: type } = window.LiteGraph.registered_node_types
      const node = window.app.rootGraph.nodes.find((n) => n.type === "MossFP16Loader")
      return { title: type.title, label: node.widgets.find((w) => w.name === "compute_dtype").label }
    })
    assert.match(shown.title, /[\u4e00-\u9fff]/)
    assert.match(shown.label ?? "", /[\u4e00-\u9fff]/)
    await page.nodePicture(ids[1], "chinese")
  })

  test("a black image and a rescue: every sentence is Chinese, on the panel and in the toast", async () => {
    const overflowing = (guard, seed) => ({ ...values(4, seed), MossFP16Loader: { ...values(4, seed).MossFP16Loader, fix: "none", guard } })
    // Names that are the same in every language.
    const names = /layer\.\d+|text\.\d+|(fix|guard) = \w+|fp16|fp32|NaN|Inf|MOSS-Image|MOSS FP16|MOSS|FP16|online|builtin|none|report|rescue|Latent|MODEL|CFG|c\s?=?\s?1\/\d+|\bc\b/g
    const chinese = (text, what) => {
      assert.match(text, /[\u4e00-\u9fff]/, what)
      assert.doesNotMatch(text.replace(names, ""), /[A-Za-z]{2,}/, `${what}: ${text}`)
    }
    for (const [guard, seed, verdict] of [["report", 611, "broken"], ["rescue", 612, "rescued"]]) {
      const ids = await page.workflow(example(EXAMPLES.headless), overflowing(guard, seed))
      const [report] = ids.MossFP16Report
      const panel = page.panel(report)
      await page.show(report)
      await page.queue()
      await until(async () => (await panel.verdict()) === verdict && /^[^·]*4 步[^·]*$/.test(await panel.state()), `${verdict}, the run done`)
      for (const part of ["badge", "state", "headline", "remedy-text", "fact", "action", "status", "remarks"]) {
        if (await panel.shows(part)) chinese(await panel.text(part), `${verdict}, ${part}`)
      }
      for (const part of ["headline", "remedy-text", "remarks"]) assert.ok(await panel.shows(part), part)
      await until(async () => (await page.toasts()).length > 0, "a toast")
      for (const toast of await page.toasts()) chinese(toast, "toast")
      await page.nodePicture(report, `S6-after-${verdict}`)
      for (const close of await page.page.locator("[data-testid='toast-close']").all()) await close.click().catch(() => {})
    }
  })

  test("every node has help in English and Chinese where the page looks for it", async () => {
    for (const node of NODES) {
      const pages = []
      for (const [file, mark] of [[`${node}.md`, /[a-z]/], [`${node}/en.md`, /[a-z]/], [`${node}/zh.md`, /[\u4e00-\u9fff]/]]) {
        const response = await fetch(`${URL_BASE}/extensions/${PACK}/docs/${file}`)
        assert.equal(response.status, 200, file)
        const text = await response.text()
        assert.match(text, mark, file)
        assert.doesNotMatch(text, /^\||^```/m, `${file}: tables and code blocks do not fit the side panel`)
        pages.push(text)
      }
      assert.equal(pages[0], pages[1], `${node}: the page asks for en.md first, other languages fall back to the one beside it`)
    }
  })

  test("every node, input and output has a name and a tooltip in both languages", async () => {
    const [info, texts] = await Promise.all([getJson("/object_info"), getJson("/i18n")])
    assert.deepEqual(Object.keys(info).filter((name) => name.startsWith("MossFP16")).sort(), [...NODES].sort())
    for (const name of NODES) {
      const inputs = { ...info[name].input.required, ...info[name].input.optional }
      for (const language of ["en", "zh"]) {
        const entry = texts[language].nodeDefs[name]
        assert.ok(entry?.display_name && entry.description, `${language} ${name}`)
        assert.deepEqual(Object.keys(entry.inputs).sort(), Object.keys(inputs).sort(), `${language} ${name}`)
        for (const [input, words] of Object.entries(entry.inputs)) assert.ok(words.name && words.tooltip, `${language} ${name}.${input}`)
        info[name].output.forEach((_, i) => assert.ok(entry.outputs[i]?.name, `${language} ${name} output ${i}`))
      }
      const english = texts.en.nodeDefs[name]
      const stale = "locales/en/nodeDefs.json is older than the schemas: run tests/tools/english_locale.py"
      assert.equal(english.display_name, info[name].display_name, stale)
      assert.equal(english.description, info[name].description, stale)
      for (const [input, spec] of Object.entries(inputs)) assert.equal(english.inputs[input].tooltip, spec[1].tooltip, `${stale} (${name}.${input})`)
    }
  })

  test("nothing went wrong in our files", () => page.assertClean())
})
