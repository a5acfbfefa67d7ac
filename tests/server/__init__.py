"""The server with the demo model, over real connections: what users and operators send, and what comes back."""
