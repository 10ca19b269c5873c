"""Connects ranks: messages, the thread that waits for them, and errors that name a rank."""
