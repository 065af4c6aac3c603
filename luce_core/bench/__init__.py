"""`luce-core bench`: numbers with everything they were measured on.

stats             spreads and percentiles
cases             which tests are run, and whether they fit
measure           one test through the steps of an engine
runner            repetitions, in turn with a peer's
facts             host, versions, commit, plan: what every result carries
energy            joules from NVML's counter
conditions        when two engines may be compared, and the gain
worker, peer      another engine in a process of its own; llama_cpp_worker is that process
report            results as data, rows and panels
sse, timeline     what a streaming server sent, and when
client, load      requests to a server, and ladders of them
load_report       the same as `report`, for ladders
render, plot      tables in Markdown, panels as a picture
"""
