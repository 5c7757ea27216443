"""What processes tell each other: ranks and groups, the handshake, messages, collectives, and what they need of devices."""
