"""What a run keeps on the disk, and shares between its processes."""
