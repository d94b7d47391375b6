"""Model states in host memory, and their transfers. The core takes them as plug-ins and never imports them."""
