import assert from "node:assert/strict"
import { beforeEach, test } from "node:test"
import { ReportStore } from "../../../web/store.js"
import { entry, report } from "./reports.mjs"

let store
beforeEach(() => {
  store = new ReportStore()
})
const begin = (promptId, workflowId = "wf") => {
  store.runStarted(promptId)
  store.runBelongsTo(promptId, workflowId)
}
const see = (node = "4", workflow = "wf") => store.view(workflow, [node])

test("idle, waiting, running, done", () => {
  assert.equal(see().phase, "idle")
  begin("p1")
  assert.equal(see().phase, "waiting")
  assert.ok(store.receive(entry({ state: "running" })))
  assert.equal(see().phase, "running")
  store.receive(entry())
  store.runEnded("p1", "done")
  assert.equal(see().phase, "done")
  assert.equal(see().cached, false)
})

test("a new run clears the report of the one before", () => {
  begin("p1")
  store.receive(entry())
  store.runEnded("p1", "done")
  begin("p2")
  assert.deepEqual([see().phase, see().report], ["waiting", null])
})

test("a run of another workflow clears nothing here", () => {
  store.receive(entry())
  begin("p2", "other")
  assert.equal(see().phase, "done")
  assert.equal(store.view("other", ["4"]).phase, "waiting")
})

test("two nodes keep apart, and so do two workflows with the same node id", () => {
  store.receive(entry())
  store.receive(entry({ node_id: "9", report: report({ mode: "none" }) }))
  store.receive(entry({ workflow_id: "wf2", report: report({ mode: "weights" }) }))
  assert.equal(see("4").report.mode, "online")
  assert.equal(see("9").report.mode, "none")
  assert.equal(see("4", "wf2").report.mode, "weights")
})

test("queued runs: a late message of the first does not overwrite the second", () => {
  begin("p1")
  store.receive(entry({ prompt_id: "p1" }))
  store.runEnded("p1", "done")
  begin("p2")
  assert.equal(store.receive(entry({ prompt_id: "p1", report: report({ mode: "late" }) })), false)
  store.receive(entry({ prompt_id: "p2", state: "running", report: report({ mode: "second" }) }))
  assert.equal(see().report.mode, "second")
})

test("a run that is all cache shows the earlier report and says so", () => {
  begin("p1")
  store.receive(entry())
  store.runEnded("p1", "done")
  begin("p2")
  store.runCached("p2", ["4", "7"])
  assert.equal(see().report, null)
  store.runEnded("p2", "done")
  assert.deepEqual([see().phase, see().cached, see().report.mode], ["done", true, "online"])
})

test("a cached loader whose sampler ran again has a live report, not a cached one", () => {
  begin("p2")
  store.runCached("p2", ["4"])
  store.receive(entry({ prompt_id: "p2" }))
  store.runEnded("p2", "done")
  assert.equal(see().cached, false)
})

test("the report node's ui output from the cache counts as cached", () => {
  begin("p2")
  store.runCached("p2", ["4"])
  store.receive({ node_id: "4", prompt_id: "p2", report: report() })
  assert.equal(see().cached, true)
})

test("a node that a run passed by says so, with and without a report before", () => {
  begin("p1")
  store.receive(entry())
  store.runEnded("p1", "done")
  begin("p2")
  store.runEnded("p2", "done")
  assert.equal(see().phase, "unsampled")
  begin("p3")
  store.runCached("p3", ["77"])
  store.runEnded("p3", "done")
  assert.equal(see("77").phase, "unsampled")
  assert.equal(see("78").phase, "idle")
})

test("failed and interrupted runs", () => {
  begin("p1")
  store.receive(entry({ state: "running" }))
  store.runEnded("p1", "failed", "out of memory", "9")
  assert.deepEqual([see().phase, see().error.text, see().errorNode, see().report.mode], ["failed", "out of memory", "9", "online"])
  store.receive(entry({ state: "running" })) // overtaken by the end of its own run
  assert.equal(see().phase, "failed")
  begin("p2")
  store.runEnded("p2", "interrupted")
  assert.deepEqual([see().phase, see().report], ["interrupted", null])
})

test("a failed run's own reason, which can be translated, comes before the server's English", () => {
  begin("p1")
  store.receive(entry({ state: "running" }))
  store.runEnded("p1", "failed", "MossError: raw words")
  const error = { key: "error_memory", values: {}, text: "Out of memory." }
  store.receive(entry({ state: "failed", report: report({ error, state: "failed" }) }))
  assert.equal(see().error.key, "error_memory")
})

test("a workflow with a run in the queue says so", () => {
  store.setQueued(["wf"])
  assert.deepEqual([see().queued, store.view("other", ["4"]).queued], [true, false])
  store.setQueued([])
  assert.equal(see().queued, false)
})

test("the workflow may be known later than the first message", () => {
  store.runStarted("p1")
  assert.ok(store.receive({ node_id: "4", prompt_id: "p1", report: report() }))
  assert.equal(see().phase, "idle")
  store.runEnded("p1", "done")
  store.runBelongsTo("p1", "wf")
  assert.equal(see().phase, "done")
})

test("a job of a script, without a workflow, belongs to no panel", () => {
  assert.equal(store.receive(entry({ workflow_id: null, prompt_id: "api" })), false)
  assert.equal(see().phase, "idle")
})

test("a run concerns the page that started it and pages with its workflow", () => {
  store.runStarted("own")
  store.receive(entry({ prompt_id: "shared" }))
  assert.ok(store.concerns("own", "wf") && store.concerns("shared", "wf"))
  assert.ok(!store.concerns("shared", "wf2") && !store.concerns("shared", null) && !store.concerns("script", "wf"))
})

test("a refused report shows why", () => {
  store.receive(entry({ report: { schema: "moss_fp16.report/7" } }))
  assert.deepEqual([see().report, see().refusal], [null, "refused.newer"])
})

test("messages of any shape are ignored or shown, never thrown", () => {
  for (const junk of [null, 1, "x", [], {}, { node_id: {} }, { node_id: "" }]) assert.equal(store.receive(junk), false)
  store.runCached("p", null)
  store.runEnded("unknown", "done")
  store.receive(entry({ report: undefined, state: {} }))
  store.receive({ ...entry(), report: 5 })
  assert.equal(see().refusal, "refused.notObject")
})

test("a node placed twice through a subgraph shows the one heard of last, by name", () => {
  store.receive(entry({ node_id: "12:3" }))
  store.receive(entry({ node_id: "13:3", report: report({ mode: "none" }) }))
  const view = store.view("wf", ["12:3", "13:3"])
  assert.deepEqual([view.report.mode, view.instance], ["none", "13:3"])
  assert.equal(store.view("wf", ["12:3"]).instance, undefined)
})

test("open runs are those that began and are not known to have ended", () => {
  begin("p1")
  begin("p2")
  store.receive(entry({ prompt_id: "never started here" }))
  store.runEnded("p1", "done")
  assert.deepEqual(store.openRuns(), ["p2"])
})

test("after a reload: running reports whose run is gone end as interrupted", () => {
  store.receive(entry({ state: "running" }))
  store.receive(entry({ node_id: "5", prompt_id: "p2", state: "running" }))
  store.endOrphans(new Set(["p2"]))
  assert.equal(see("4").phase, "interrupted")
  assert.equal(see("5").phase, "running")
})

test("after a reload in mid-run: the report of the run before is cleared, that of the run stays", () => {
  for (let i = 0; i < 2; i++) store.receive(entry({ node_id: "5", prompt_id: "p2", state: "running" }))
  store.receive(entry({ prompt_id: "p1" })) // what the server kept comes after the first live messages
  begin("p2")
  assert.equal(see("4").phase, "waiting")
  assert.equal(see("5").phase, "running")
})

test("memory is bounded", () => {
  for (let i = 0; i < 3000; i++) {
    begin(`p${i}`, `wf${i}`)
    store.receive(entry({ node_id: String(i), prompt_id: `p${i}`, workflow_id: `wf${i}` }))
  }
  assert.ok(store.slots.size <= 500 && store.runs.size <= 200)
})
