"""Jobs whose members come and go: the keeper that decides who takes part, and a member's side of it."""
