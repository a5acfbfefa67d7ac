"""The HTTP server: OpenAI's interface for those who use models, and a control interface of its own for those who run them.

`app` and its routes speak HTTP and nothing else; what they serve are `ServedModel`s, each a client (`AsyncLLM`) of an engine in a process
of its own. The packages that it needs are the extra `serve`, so nothing outside this room imports it but the command `hardpoint serve`.
`ray_app` puts replicas of it on a Ray cluster.
"""
