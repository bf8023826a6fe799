"""What a federated round is: trees, draws, methods and their taps, a client's training, and the round itself.

Nothing here knows how a round is made fast, where a run is kept, or what a command is called. The rooms around it
import this one; it imports none of them. `speed` is the only door to the room `fast`.
"""
