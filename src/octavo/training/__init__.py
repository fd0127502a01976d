"""Fine-tuning of encoders: examples, the loop, what it can go on from, and the folder that it writes."""
