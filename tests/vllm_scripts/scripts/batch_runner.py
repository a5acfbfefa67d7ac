"""The batch runner of the OpenAI server"""

from vllm.entrypoints.openai.run_batch import main

main()
