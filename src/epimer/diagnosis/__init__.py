"""What can be known of a merge before it is made, and how its models lie in the loss landscape."""
