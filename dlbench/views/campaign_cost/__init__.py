"""What a campaign cost by Slurm's accounting: node-hours asked for, used and wasted, queue wait, memory, energy."""
