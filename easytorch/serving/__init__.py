"""`easytorch serve`: an OpenAI-compatible HTTP server over the engine. The extra `serve` brings what it needs.

app.py         routes, by what the model can do
schemas.py     the requests, as OpenAI names their fields
answers.py     what is sent back for chat and completions, at once or as events
worker.py      the thread that owns the engine
embedder.py    vectors of an encoder
errors.py      OpenAI's error body
limits.py      API key, size of a body
events.py      server-sent events, until the client goes
metrics.py     Prometheus's text
page.py        the page at `/`: a conversation with the model
run.py         uvicorn
"""
