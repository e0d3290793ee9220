"""What a client trains with, and when it takes part: settings, and pure functions of them."""
