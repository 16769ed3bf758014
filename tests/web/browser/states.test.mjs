// Every state a run can be in, as the panel shows it: a picture of each, on both canvases and in both themes.

import assert from "node:assert/strict"
import { after, before, describe, test } from "node:test"
import { CASES, run } from "../unit/reports.mjs"
import { Page, until } from "./comfy.mjs"

let serial = 0

for (const vue of [false, true]) {
  describe(vue ? "Nodes 2.0" : "classic canvas", () => {
    let page, workflow, loader, report, panel, pending

    before(async () => {
      page = await Page.open({ vue })
      pending = []
      await page.page.route(/\/api\/jobs\?status=pending/, (route) => route.fulfill({ json: { jobs: pending } }))
    })
    after(() => page?.close())

    /** Loader and Report, wired up, that no run has touched yet. */
    async function fresh() {
      let ids
      ;({ workflow, ids } = await page.place([["MossFP16Loader", 340], ["MossFP16Report", 460]]))
      ;[loader, report] = ids
      await page.node(loader, (node, report) => void node.connect(0, node.graph.getNodeById(Number(report)), "model"), report)
      await page.set(loader, { fix: "none" })
      await page.show(report)
      panel = page.panel(report)
    }
    const tell = (id, prompt, given, state) =>
      page.message("moss_fp16.report", {
        node_id: id, prompt_id: prompt, workflow_id: workflow, state, report: { ...given, node_id: loader, state },
      })
    const begin = async () => {
      const prompt = `states-${++serial}`
      await page.message("execution_start", { prompt_id: prompt })
      await panel.until((state) => state === "run started", "the start")
      return prompt
    }
    const half = (given) => ({ ...given, step: 9 })
    async function ended(given) {
      const prompt = await begin()
      for (const id of [loader, report]) await tell(id, prompt, given, "done")
      await page.message("execution_success", { prompt_id: prompt })
      return prompt
    }

    /** name -> what brings the panel there, and what it then says: [state, verdict, headline]. */
    const STATES = {
      idle: [async () => {}, ["idle", "none", ""]],
      queued: [
        async () => {
          pending = [{ id: "waiting", workflow_id: workflow }]
          await page.message("promptQueued", {})
        },
        ["queued", "none", ""],
      ],
      waiting: [begin, ["run started", "none", ""]],
      running: [async () => tell(loader, await begin(), half(CASES.fine), "running"), [/^step 9 of 20 · live from Load MOSS-Image/, "ok", "In range so far"]],
      done: [() => ended(CASES.fine), ["done, 20 steps", "ok", "Image not affected by fp16"]],
      rescued: [() => ended(CASES.rescued), ["done, 20 steps", "rescued", /^Image is fine: step 4 was computed again/]],
      saturated: [() => ended(CASES.saturated), ["done, 20 steps", "saturated", /^Image may be wrong/]],
      broken: [() => ended(CASES.broken), ["ended after 20 steps, result broken", "broken", /^Image is black or broken/]],
      interrupted: [
        async () => {
          const prompt = await begin()
          await tell(loader, prompt, half(CASES.fine), "running")
          await tell(loader, prompt, half(CASES.fine), "interrupted")
          await page.message("execution_interrupted", { prompt_id: prompt })
        },
        [/^interrupted at step 9 of 20 · from Load MOSS-Image/, "interrupted", "In range so far"],
      ],
      failed: [
        async () => {
          const prompt = await begin()
          await page.message("execution_error", { prompt_id: prompt, node_id: loader, exception_message: "burst.safetensors is not a MOSS-Image checkpoint." })
        },
        ["before the first step", "failed", /^Load MOSS-Image \(FP16\) failed: burst\.safetensors is not/],
      ],
      cached: [
        async () => {
          await ended(CASES.fine)
          const prompt = await begin()
          await page.message("execution_cached", { prompt_id: prompt, nodes: [loader, report] })
          await page.message("execution_success", { prompt_id: prompt })
        },
        ["from cache: report of an earlier run", "ok", "Image not affected by fp16"],
      ],
      muted: [
        async () => {
          await ended(CASES.fine)
          await page.node(report, (node) => void (node.mode = 2))
        },
        ["muted · done, 20 steps", "ok", "Image not affected by fp16"],
      ],
      bypassed: [() => page.node(report, (node) => void (node.mode = 4)), ["bypassed", "none", ""]],
      collapsed: [
        async () => {
          await ended(CASES.broken)
          await page.node(report, (node) => void node.collapse())
        },
        null,
      ],
    }

    const matches = (wanted, said) => (wanted instanceof RegExp ? wanted.test(said) : wanted === said)

    for (const [state, [bring, wanted]] of Object.entries(STATES)) {
      test(state, async () => {
        pending = []
        await fresh()
        await bring()
        if (wanted) {
          const [words, verdict, headline] = wanted
          await until(async () => matches(words, await panel.state()), `the panel to be ${state}, not ${await panel.state()}`, 15)
          assert.equal(await panel.verdict(), verdict)
          assert.ok(matches(headline, await panel.text("headline")), await panel.text("headline"))
        } else {
          await until(async () => !(await panel.root.isVisible()), "the panel to be gone", 15)
        }
        for (const dark of [true, false]) {
          await page.theme(dark)
          await page.nodePicture(report, `state-${vue ? "nodes2" : "classic"}-${dark ? "dark" : "light"}-${state}`)
        }
        await page.theme(true)
      })
    }

    test("opened again after it was collapsed, the panel is as it was", async () => {
      await page.node(report, (node) => void node.collapse())
      await until(() => panel.root.isVisible(), "the panel to be back", 15)
      assert.match(await panel.text("headline"), /^Image is black or broken/)
      assert.ok((await panel.root.locator(".moss-chart").boundingBox()).height >= 80)
    })

    test("the loader beside a report node is small, and can be opened", async () => {
      await fresh()
      await ended(CASES.broken)
      await page.show(loader)
      const small = page.panel(loader)
      assert.equal(await small.root.getAttribute("data-small"), "")
      for (const part of ["badge", "headline", "remedy-button", "chart"]) assert.ok(await small.shows(part), part)
      for (const part of ["numbers", "status", "remarks"]) assert.equal(await small.shows(part), false, part)
      const room = await small.root.evaluate((root) => root.scrollHeight - root.clientHeight)
      assert.ok(room <= 1, `${room} px too high`)
      await page.nodePicture(loader, `small-${vue ? "nodes2" : "classic"}`)
      await small.click("size")
      assert.ok(await small.shows("status"))
      await page.nodePicture(loader, `opened-${vue ? "nodes2" : "classic"}`)
      await small.click("size")
      // A report node that does not run shows nothing: then the loader's own panel is the one.
      await page.node(report, (node) => void (node.mode = 4))
      await until(async () => (await small.root.getAttribute("data-small")) === null, "the whole panel", 15)
    })

    test("a long list of remarks is folded, not cut", async () => {
      const many = Array.from({ length: 9 }, (_, i) => ({ key: "", values: {}, severity: "warn", text: `Remark ${i + 1}, of some length so that it takes a line or two of the panel's width.` }))
      await fresh()
      await ended(run(3904, { messages: many }))
      await page.show(report, { width: 460 })
      const shown = await panel.root.locator(".moss-remarks li:visible").count()
      if (vue && shown === 9) return // there the node grows with what it holds
      assert.ok(shown < 9, "all are shown")
      assert.equal(await panel.text("more"), `${9 - shown} more`)
      const room = () => panel.root.evaluate((root) => root.scrollHeight - root.clientHeight)
      assert.ok((await room()) <= 1)
      await page.nodePicture(report, "folded-remarks")
      await panel.root.locator(".moss-more").click()
      assert.equal(await panel.root.locator(".moss-remarks li").evaluateAll((list) => list.filter((li) => !li.hidden).length), 9)
      await panel.root.locator(".moss-more").click()
      assert.ok((await room()) <= 1)
    })

    test("nothing went wrong in our files", () => page.assertClean())
  })
}
