"""What the server answers at each path, an interface a file: OpenAI's, Anthropic's, Ollama's, and its own."""
