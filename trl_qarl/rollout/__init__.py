"""Generation batches: drawn, validated, drawn ahead."""
