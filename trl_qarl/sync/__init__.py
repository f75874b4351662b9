"""Weight sync: what is published, by which channel, and how it is checked."""
