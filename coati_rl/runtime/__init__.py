"""Everything that touches Ray: start, placement, remote calls with deadlines, supervision and a clean end."""
