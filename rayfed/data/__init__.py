"""Data: sources of images, partitions among clients, augmentation of batches."""
