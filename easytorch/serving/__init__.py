"""`easytorch serve`: an OpenAI-compatible HTTP server over the engine. Needs the extra `serve`.

app.py         routes, by what the model can do
schemas.py     the request bodies, by OpenAI's field names
chat.py        conversations as prompts, by the chat template
completions.py responses for chat and completions, complete or streamed
worker.py      the thread that owns the engine
embedder.py    embeddings from an encoder
errors.py      OpenAI's error body
limits.py      the API key, and the maximum body size
events.py      server-sent events, until the client disconnects
metrics.py     metrics in Prometheus's text format
page.py        the chat page at `/`
run.py         uvicorn
"""
