// The example workflow in the page: queued, watched, compared with /history, reloaded, copied, saved, interrupted.

import assert from "node:assert/strict"
import fs from "node:fs"
import { after, before, describe, test } from "node:test"
import * as format from "../../../web/format.js"
import { EXAMPLES, Page, example, getJson, sleep, until } from "./comfy.mjs"

const SMALL = {
  MossFP16Loader: { model_name: "hot.safetensors", compute_dtype: "fp16" },
  EmptyFlux2LatentImage: { width: 64, height: 64 },
}
const values = (steps, seed = 1, loader = {}) => ({
  ...SMALL, MossFP16Loader: { ...SMALL.MossFP16Loader, ...loader }, KSampler: { steps, seed },
})

/** The report's blocks as the panel's table writes them; counts that are 0 throughout have no column. */
const tableOf = (report) => {
  const counted = ["non_finite", "saturated", "clamped", "over"].filter((name) => report.blocks.some((b) => b[name] > 0))
  return report.blocks.map((b) => [
    b.name, format.exact(b.max_abs), format.bits(b.headroom_bits), ...counted.map((name) => format.grouped(b[name])),
  ])
}

async function agrees(page, nodeId, report) {
  await page.show(nodeId)
  const panel = page.panel(nodeId)
  if ((await panel.root.getAttribute("data-small")) !== null) await panel.click("size")
  assert.deepEqual((await panel.rows()).slice(1), tableOf(report))
  const { block, peak, headroom_bits: bits } = report.summary
  assert.ok((await panel.text("fact")).startsWith(`largest value ${format.peak(peak)} in ${block} · margin ${format.bits(bits)} bits`))
  assert.equal(await panel.text("headline"), "Image not affected by fp16")
  const status = (await panel.text("status")).replaceAll("\u00a0", " ")
  for (const part of [`fix ${report.mode}`, `engine ${report.engine}`, report.compute_dtype, "no value saturated, none NaN/inf"]) {
    assert.ok(status.includes(part), status)
  }
}

for (const vue of [false, true]) {
  describe(vue ? "Nodes 2.0" : "classic canvas", () => {
    let page, loader, reporter, promptId, report
    const seed = vue ? 200 : 100
    before(async () => {
      page = await Page.open({ vue })
      const ids = await page.workflow(example(EXAMPLES.headless), values(24, seed))
      loader = page.panel(ids.MossFP16Loader[0])
      reporter = page.panel(ids.MossFP16Report[0])
      page.ids = { loader: ids.MossFP16Loader[0], reporter: ids.MossFP16Report[0], sampler: ids.KSampler[0] }
      await page.show(page.ids.loader)
      await page.show(page.ids.reporter)
    })
    after(() => page?.close())

    test("live: it waits, counts the steps, and is done; the report node follows the loader's run", async () => {
      assert.equal(await loader.state(), "idle")
      ;[promptId] = await Promise.all([page.queue()])
      const [seen, followed] = await Promise.all([
        loader.watch((state) => state.startsWith("done")),
        reporter.watch((state) => /^done, 24 steps$/.test(state)),
      ])
      const steps = seen.map((state) => /^step (\d+) of 24$/.exec(state)?.[1]).filter(Boolean).map(Number)
      assert.ok(steps.length >= 2, seen.join(" | "))
      assert.deepEqual(steps, [...steps].sort((a, b) => a - b))
      assert.equal(seen.at(-1), "done, 24 steps")
      assert.ok(followed.some((state) => /^step \d+ of 24 · live from /.test(state)), followed.join(" | "))
    })

    test("its numbers are those of /history", async () => {
      const outputs = (await page.history(promptId)).outputs
      report = outputs[page.ids.reporter].moss_fp16_report[0]
      assert.equal(report.blocks.length, 6)
      await agrees(page, page.ids.reporter, report)
      await agrees(page, page.ids.loader, report)
      await page.show(page.ids.reporter)
      await page.nodePicture(page.ids.reporter, `live-${vue ? "nodes2" : "classic"}-done`)
    })

    test("copy and save hand on the report as it came", async () => {
      await reporter.click("copy")
      await until(async () => (await reporter.text("live")) === "Copied", "the copy")
      const copied = JSON.parse(await page.page.evaluate(() => navigator.clipboard.readText()))
      assert.deepEqual(copied, report)
      const [download] = await Promise.all([page.page.waitForEvent("download"), reporter.click("save")])
      assert.match(download.suggestedFilename(), /^moss-report-[\w-]+\.json$/)
      assert.deepEqual(JSON.parse(fs.readFileSync(await download.path(), "utf8")), report)
    })

    test("nothing of the panel is in the workflow or in the prompt", async () => {
      const { workflow, output } = await page.page.evaluate(async () => {
        const { workflow, output } = await window.app.graphToPrompt()
        return JSON.parse(JSON.stringify({ workflow, output }))
      })
      for (const text of [JSON.stringify(workflow), JSON.stringify(output)]) {
        assert.ok(!/moss_fp16_panel|moss_fp16\.report|headroom|mossHint/.test(text), "the panel is in the workflow")
      }
      const original = example(EXAMPLES.headless)
      for (const node of original.nodes) {
        const saved = workflow.nodes.find((n) => n.id === node.id)
        assert.equal(saved.widgets_values?.length ?? 0, node.widgets_values?.length ?? 0, node.type)
      }
    })

    test("after a reload the last report is back", async () => {
      await page.reload()
      await page.show(page.ids.loader)
      assert.equal(await loader.until((s) => s.startsWith("done"), "reload"), "done, 24 steps")
      await agrees(page, page.ids.loader, report)
      await agrees(page, page.ids.reporter, report)
    })

    test("the same again comes from the cache, and the panels say so, after a reload too", async () => {
      await page.history(await page.queue())
      for (const reload of [false, true]) {
        if (reload) await page.reload()
        await page.show(page.ids.reporter)
        assert.match(await reporter.until((s) => s.startsWith("from cache"), "cached"), /earlier run/)
        await page.show(page.ids.loader)
        assert.match(await loader.until((s) => s.startsWith("from cache"), "cached"), /earlier run/)
        await agrees(page, page.ids.loader, report)
      }
    })

    test("the same workflow in a new tab, all of it cached: both panels show the report", async () => {
      const again = await page.page.evaluate(() => window.app.rootGraph.serialize())
      const ids = await page.workflow(again)
      await page.history(await page.queue())
      for (const type of ["MossFP16Report", "MossFP16Loader"]) {
        await page.show(ids[type][0])
        await page.panel(ids[type][0]).until((s) => s.startsWith("from cache"), `${type} cached`)
        await agrees(page, ids[type][0], report)
      }
    })

    test("a connection lost in mid-run: the panel catches up", async () => {
      await page.node(page.ids.sampler, (node) => void (node.widgets.find((w) => w.name === "seed").value += 1))
      const id = await page.queue()
      await loader.until((state) => /^step \d+ of 24$/.test(state), "a first step")
      await page.page.evaluate(() => {
        window.app.api.socket.close() // the page opens another by itself
      })
      await page.history(id)
      assert.equal(await loader.until((state) => state.startsWith("done"), "after the reconnect"), "done, 24 steps")
    })

    test("a run whose end was not heard: a reconnect finds out", async () => {
      const missed = await page.page.evaluate(async () => {
        const { api } = window.app
        const [job] = (await (await api.fetchApi("/jobs?status=completed&limit=1")).json()).jobs
        api.dispatchCustomEvent("execution_start", { prompt_id: job.id }) // its other messages are lost
        return job.id
      })
      assert.ok(missed)
      await page.page.evaluate(() => window.app.api.dispatchCustomEvent("reconnected"))
      await loader.until((state) => !["run started", "idle"].includes(state), "after the reconnect")
    })

    test("with the side panel open the node keeps its panel", async () => {
      await page.select(page.ids.loader)
      const open = page.page.locator("button[aria-label='Reset all parameters']").first()
      if (!(await open.isVisible())) await page.page.locator("button[aria-label='Toggle properties panel']").first().click()
      await open.waitFor()
      await sleep(300)
      await page.picture(`side-panel-${vue ? "nodes2" : "classic"}`)
      assert.equal(await loader.root.count(), 1)
      assert.ok(await loader.root.evaluate((root) => Boolean(root.closest(".graph-canvas-container"))))
    })

    test("a reload in mid-run picks the run up, and an interrupt ends it: both panels say where", async () => {
      await page.set(page.ids.sampler, { steps: 2000, seed: 7 })
      await sleep(1200) // the page keeps its draft of the workflow with a delay
      const id = await page.queue()
      await loader.until((state) => /^step \d+ of 2000$/.test(state), "a first step")
      await page.reload()
      await page.show(page.ids.loader)
      const step = (state) => Number(/^step (\d+) of 2000$/.exec(state)?.[1] ?? 0)
      const first = step(await loader.until((state) => step(state) > 0, "after the reload"))
      await loader.until((state) => step(state) > first, "live after the reload")
      await page.page.evaluate(() => window.app.api.interrupt())
      await page.history(id)
      assert.match(await loader.until((state) => state.startsWith("interrupted"), "interrupt"), /^interrupted at step \d+ of 2000$/)
      await page.show(page.ids.reporter)
      assert.match(await reporter.until((s) => s.startsWith("interrupted at"), "the report node"), /^interrupted at step \d+ of 2000/)
      assert.match(await reporter.text("badge"), /Interrupted/)
      assert.equal(await reporter.bars().count(), 6)
      await page.nodePicture(page.ids.reporter, `S4-after-${vue ? "nodes2" : "classic"}`)
    })

    test("nothing went wrong in our files", () => page.assertClean())
  })
}

describe("the fix off", () => {
  let page, loader, reporter, ids
  const overflowing = (steps, seed, guard) => values(steps, seed, { fix: "none", guard, self_check: false })
  before(async () => {
    page = await Page.open({ width: 1900 }) // a toast does not cover the report then
    ids = await page.workflow(example(EXAMPLES.headless), overflowing(4, 300, "report"))
    loader = page.panel(ids.MossFP16Loader[0])
    reporter = page.panel(ids.MossFP16Report[0])
    await page.show(ids.MossFP16Report[0])
  })
  after(() => page?.close())
  /** The report node in both themes, and wide and low, as a template's card shows it. */
  const both = async (name) => {
    for (const dark of [false, true]) {
      await page.theme(dark)
      await page.nodePicture(ids.MossFP16Report[0], dark ? name : `${name}-light`)
    }
    await page.show(ids.MossFP16Report[0], { width: 640 })
    await page.picture(`${name}-wide`, reporter.root)
    await page.show(ids.MossFP16Report[0], { width: 460, height: 500 })
  }

  test("a black image is the first line, and what to do the second", async () => {
    const id = await page.queue()
    await reporter.until((state) => state === "ended after 4 steps, result broken", "done")
    assert.match(await reporter.text("badge"), /Broken/)
    assert.match(await reporter.text("headline"), /^Image is black or broken: the model left fp16's range$/)
    assert.match(await reporter.text("remedy-text"), /^Set fix = auto on Load MOSS-Image/)
    assert.match(await reporter.text("fact"), /^NaN or infinity in (text|layer)\.\d+/)
    assert.match(await reporter.text("action"), /No fix is active\.$/)
    assert.equal(await loader.verdict(), "broken")
    await both("S3-after")
    const stored = await getJson(`/moss_fp16/reports/${ids.MossFP16Loader[0]}?workflow_id=${await page.page.evaluate(() => window.app.rootGraph.id)}`)
    assert.equal(stored.prompt_id, id)
    assert.ok(stored.report.summary.non_finite + stored.report.summary.saturated > 0)
  })

  test("one toast says so, with what to do, and stays until it is closed", async () => {
    await until(async () => (await page.toasts()).length === 1, "one toast")
    const [said] = await page.toasts()
    assert.match(said, /^Image is black or broken\s/)
    assert.match(said, /fix = auto/)
    await sleep(7000) // a toast that goes by itself is gone after 6 seconds
    assert.deepEqual(await page.toasts(), [said])
    await page.picture("S2-after")
    await page.page.locator("[data-testid='toast-close']").click()
    await until(async () => (await page.toasts()).length === 0, "no toast")
  })

  test("the button sets fix = auto, undo takes it back, and the next run is fine", async () => {
    const button = reporter.root.locator(".moss-remedy-button")
    assert.equal(await button.textContent(), "Set fix = auto")
    const fix = () => page.widget(ids.MossFP16Loader[0], "fix")
    await button.click()
    await until(async () => (await fix()) === "auto", "fix = auto")
    await until(async () => (await reporter.text("remedy-text")).startsWith("fix = auto is set"), "the panel to say so")
    assert.equal(await button.isVisible(), false)
    await page.command("Comfy.Undo")
    await until(async () => (await fix()) === "none", "undone")
    await until(() => button.isVisible(), "the button again")
    await button.click()
    await until(async () => (await fix()) === "auto", "fix = auto")
    await page.queue()
    await reporter.until((state) => state === "done, 4 steps", "the second run")
    assert.equal(await reporter.text("headline"), "Image not affected by fp16")
    assert.equal(await reporter.verdict(), "ok")
    assert.match(await reporter.text("fact"), /margin \d\.\d bits( \(small\))?$/)
    await both("R2-after")
  })

  test("a rescued run: the image is fine, said without a warning that no fix is active", async () => {
    ids = await page.workflow(example(EXAMPLES.headless), overflowing(6, 301, "rescue"))
    reporter = page.panel(ids.MossFP16Report[0])
    await page.show(ids.MossFP16Report[0])
    await page.queue()
    await reporter.until((state) => state === "done, 6 steps", "done")
    assert.match(await reporter.text("badge"), /Rescued/)
    assert.match(await reporter.text("headline"), /^Image is fine: step 1 was computed again with /)
    assert.match(await reporter.text("remedy-text"), /^To save the repeated steps? set fix = auto/)
    assert.doesNotMatch(await reporter.text("remarks"), /No fix|without a fix/)
    await page.nodePicture(ids.MossFP16Report[0], "R2-after-rescued")
  })

  test("a run that failed says so in red, and why, at the top", async () => {
    await page.set(ids.MossFP16Loader[0], { engine: "native" }) // this ComfyUI has no class for it
    await page.queue()
    await reporter.until((state) => state === "before the first step", "failed")
    assert.match(await reporter.text("badge"), /Failed/)
    assert.match(await reporter.text("headline"), /^Load MOSS-Image \(FP16\) failed: /)
    await page.show(ids.MossFP16Loader[0])
    assert.match(await page.panel(ids.MossFP16Loader[0]).text("headline"), /^The run failed: /)
    await page.nodePicture(ids.MossFP16Loader[0], "S5-after")
    await page.set(ids.MossFP16Loader[0], { engine: "auto" })
  })

  test("a value that cannot be read is refused when it is queued, and its input comes into view", async () => {
    await page.set(ids.MossFP16Loader[0], { c: "abc" })
    assert.equal(await page.node(ids.MossFP16Loader[0], (node) => node.showAdvanced === true), false)
    const [response] = await Promise.all([
      page.page.waitForResponse((r) => new URL(r.url()).pathname === "/api/prompt"),
      page.page.evaluate(() => window.app.queuePrompt(0, 1)),
    ])
    assert.equal(response.status(), 400)
    assert.match(JSON.stringify(await response.json()), /abc/)
    await until(() => page.node(ids.MossFP16Loader[0], (node) => node.showAdvanced === true), "the advanced inputs")
    await page.show(ids.MossFP16Loader[0])
    await page.picture("S5-after-refused")
    page.messages = page.messages.filter((line) => !/400/.test(line))
  })

  test("nothing went wrong in our files", () => page.assertClean())
})
