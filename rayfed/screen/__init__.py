"""What commands share: text, progress, options, exit codes."""
