// The example workflow in the page: queued, watched, compared with /history, reloaded, copied, saved, interrupted.

import assert from "node:assert/strict"
import fs from "node:fs"
import { after, before, describe, test } from "node:test"
import * as format from "../../../web/format.js"
import { Page, example, getJson, sleep } from "./comfy.mjs"

const SMALL = {
  MossFP16Loader: { model_name: "hot.safetensors", compute_dtype: "fp16" },
  EmptyFlux2LatentImage: { width: 64, height: 64 },
}
const values = (steps, seed = 1, loader = {}) => ({
  ...SMALL, MossFP16Loader: { ...SMALL.MossFP16Loader, ...loader }, KSampler: { steps, seed },
})

/** The report's blocks as the panel's table writes them. */
const tableOf = (report) =>
  report.blocks.map((b) => [
    b.name, format.exact(b.max_abs), format.bits(b.headroom_bits), ...[b.saturated, b.clamped, b.non_finite, b.over].map(String),
  ])

async function agrees(page, nodeId, report) {
  await page.show(nodeId)
  const panel = page.panel(nodeId)
  assert.deepEqual(await panel.rows(), tableOf(report))
  const { block, peak, headroom_bits: bits } = report.summary
  assert.equal(await panel.text("headline"), `${block} peaks ${format.peak(peak)} · ${format.bits(bits)} bits of headroom`)
  const status = await panel.text("status")
  for (const part of [report.mode, report.engine, report.compute_dtype]) assert.ok(status.includes(part), status)
  for (const part of ["saturated 0", "clamped 0", "non-finite 0", "rescued 0"]) assert.ok(status.includes(part), status)
}

for (const vue of [false, true]) {
  describe(vue ? "Nodes 2.0" : "classic canvas", () => {
    let page, loader, reporter, promptId, report
    const seed = vue ? 200 : 100
    before(async () => {
      page = await Page.open({ vue })
      const ids = await page.workflow(example("moss_fp16_headless"), values(24, seed))
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
        reporter.watch((state) => state.startsWith("done")),
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
      await sleep(200)
      const copied = JSON.parse(await page.page.evaluate(() => navigator.clipboard.readText()))
      assert.deepEqual(copied, report)
      assert.equal(await reporter.text("live"), "Copied")
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
        assert.ok(!/moss_fp16_panel|moss_fp16\.report|headroom/.test(text), "the panel is in the workflow")
      }
      const original = example("moss_fp16_headless")
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

    test("the same again comes from the cache, and the panels say so", async () => {
      await page.history(await page.queue())
      assert.match(await reporter.until((s) => s.startsWith("from cache"), "cached"), /earlier run/)
      await page.show(page.ids.loader)
      assert.match(await loader.until((s) => s.startsWith("from cache"), "cached"), /earlier run/)
      await agrees(page, page.ids.loader, report)
    })

    test("a connection lost in mid-run: the panel catches up", async () => {
      await page.page.evaluate((id) => {
        window.app.rootGraph.getNodeById(id).widgets.find((w) => w.name === "seed").value += 1
      }, Number(page.ids.sampler))
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
      await page.page.evaluate((id) => {
        const node = window.app.canvas.graph.getNodeById(id)
        window.app.canvas.selectNode(node)
      }, Number(page.ids.loader))
      const open = page.page.locator("button[aria-label='Reset all parameters']").first()
      if (!(await open.isVisible())) await page.page.locator("button[aria-label='Toggle properties panel']").first().click()
      await open.waitFor()
      await sleep(500)
      await page.picture(`side-panel-${vue ? "nodes2" : "classic"}`)
      assert.equal(await loader.root.count(), 1)
      assert.ok(await loader.root.evaluate((root) => Boolean(root.closest(".graph-canvas-container"))))
    })

    test("a reload in mid-run picks the run up, and an interrupt ends it", async () => {
      await page.page.evaluate((id) => {
        const node = window.app.rootGraph.getNodeById(id)
        for (const [name, value] of Object.entries({ steps: 2000, seed: 7 })) node.widgets.find((w) => w.name === name).value = value
      }, Number(page.ids.sampler))
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
      assert.equal(await reporter.state(), "interrupted")
    })

    test("nothing went wrong in our files", () => page.assertClean())
  })
}

describe("the fix off", () => {
  let page, loader, ids
  before(async () => {
    page = await Page.open()
    ids = await page.workflow(example("moss_fp16_headless"), values(4, 300, { fix: "none", guard: "report", self_check: false }))
    loader = page.panel(ids.MossFP16Loader[0])
    await page.show(ids.MossFP16Loader[0])
  })
  after(() => page?.close())

  test("an overflow is named, with its block, and said in a toast", async () => {
    const id = await page.queue()
    await loader.until((state) => state.startsWith("done"), "done")
    assert.match(await loader.text("badge"), /Overflow/)
    assert.match(await loader.text("headline"), /^(text|layer)\.\d+ (and \d+ more )?overflowed|no headroom/)
    assert.match(await loader.text("action"), /No fix was applied\.$/)
    await page.page.locator("li", { hasText: "MOSS FP16" }).first().waitFor()
    await page.show(ids.MossFP16Report[0])
    await page.nodePicture(ids.MossFP16Report[0], "live-overflow")
    const stored = await getJson(`/moss_fp16/reports/${ids.MossFP16Loader[0]}`)
    assert.equal(stored.prompt_id, id)
    assert.ok(stored.report.summary.non_finite + stored.report.summary.saturated > 0)
  })

  test("the guard's rescue is told: where, when, and with what", async () => {
    ids = await page.workflow(example("moss_fp16_headless"), values(6, 301, { fix: "none", guard: "rescue", self_check: false }))
    await page.show(ids.MossFP16Loader[0])
    await page.queue()
    await loader.until((state) => state.startsWith("done, 6"), "done")
    assert.match(await loader.text("badge"), /Rescued/)
    assert.match(await loader.text("action"), /^Rescued .*step 1 /)
    assert.match(await loader.text("headline"), /bits of headroom$|stream is fp32/)
    await page.show(ids.MossFP16Report[0])
    await page.nodePicture(ids.MossFP16Report[0], "live-rescued")
  })

  test("nothing went wrong in our files", () => page.assertClean())
})
