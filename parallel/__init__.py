"""Where does it compute? The rank mesh, process groups, Megatron layers, stage-to-stage transport, placement."""
