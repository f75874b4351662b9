"""What `trl-qarl bench` measures."""
