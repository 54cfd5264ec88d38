"""Tools and environments as TRL's documentation writes them, unchanged by this project."""

import asyncio
import random
from itertools import cycle

from PIL import Image


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0.01)
    return a + b


def take_screenshot() -> list[dict]:
    """
    Takes a screenshot of the current page.

    Returns:
        The screenshot, and a text.
    """
    return [
        {"type": "image", "image": Image.new("RGB", (32, 32), "blue")},
        {"type": "text", "text": "Here is the screenshot."},
    ]


class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return "Increment the counter."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter)


class PlainIncrementEnv:
    """Has no reward of its own: a function reads its state."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def counter_reward(completions, environments, **kwargs):
    return [float(environment.counter) for environment in environments]


def length_reward(completions, **kwargs):
    return [0.1 * len(completion) for completion in completions]


class CodingEnv:
    def reset(self, *, task: str, **kwargs) -> str:
        self.passed = False
        return f"Task: {task}"

    def run_code(self, code: str) -> str:
        """
        Run code and report whether it passes.

        Args:
            code: The code to run.

        Returns:
            The result of the tests.
        """
        self.passed = code == "print(1)"
        return "passed" if self.passed else "failed"

    async def get_reward(self) -> float:
        return 1.0 if self.passed else 0.0


class GameEnv:
    def reset(self, **kwargs) -> str:
        self.position = 0
        return "You are at 0."

    def move(self, direction: str) -> str:
        """
        Move one step.

        Args:
            direction: Either "left" or "right".

        Returns:
            The new position.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction: {direction}")
        self.position += 1 if direction == "right" else -1
        return f"You are at {self.position}."

    def get_reward(self) -> float:
        return 0.5 * self.position


class WordleEnv:
    def __init__(self):
        self.done = False
        self.reward = 0.0

    def reset(self, **kwargs) -> str:
        self.done, self.reward, self.guesses = False, 0.0, 0
        self.word = kwargs["word"]
        return "Guess the word."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        self.guesses += 1
        letters = guess.strip("[]")
        feedback = "".join(
            "G" if a == b else "Y" if a in self.word else "X" for a, b in zip(letters, self.word, strict=False)
        )
        self.reward = feedback.count("G") / len(self.word)
        self.done = feedback == "G" * len(self.word) or self.guesses == 6
        return feedback


def wordle_reward(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]


class CatchEnv:
    def reset(self, **kwargs) -> list[dict]:
        self.ball, self.paddle, self.rng = [2, 0], 2, random.Random(0)
        self.reward = 0.0
        return [{"type": "text", "text": "Catch the ball."}, {"type": "image", "image": self._draw()}]

    def move(self, direction: str) -> list[dict]:
        """
        Move the paddle; the ball falls by one row.

        Args:
            direction: One of "left", "stay" and "right".

        Returns:
            A picture of the board.
        """
        self.paddle += {"left": -1, "stay": 0, "right": 1}[direction]
        self.ball[1] += 1
        if self.ball[1] == 2:
            self.reward = 1.0 - 0.25 * abs(self.paddle - self.ball[0])
        return [{"type": "image", "image": self._draw()}, {"type": "text", "text": f"row {self.ball[1]}"}]

    def _draw(self) -> Image.Image:
        board = Image.new("RGB", (32, 32))
        board.putpixel((4 * self.ball[0], 4 * self.ball[1]), (255, 255, 255))
        board.putpixel((4 * self.paddle, 31), (0, 255, 0))
        return board

    def get_reward(self) -> float:
        return self.reward


class Client:
    """Stands for a client of OpenEnv, whose server keeps the state of an episode."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def reset(self) -> str:
        self.actions: list[str] = []
        return "Ready."

    def step(self, action: str) -> tuple[str, float]:
        """What is observed, and the reward."""
        self.actions.append(action)
        return f"Echo: {action}", len(action) * 0.1


ECHO_URL = "http://localhost:8001"


class EchoToolEnv:
    def __init__(self):
        self.env = Client(base_url=ECHO_URL)
        self.reward = 0.0

    def reset(self, **kwargs) -> None:
        self.env.reset()
        self.reward = 0.0

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo.

        Returns:
            The echoed message.
        """
        observation, self.reward = self.env.step(message)
        return observation


def echo_reward(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]


class DrivingEnv:
    """Each instance takes the next of a fixed list of servers, and shows what a camera sees."""

    urls = cycle(f"http://localhost:{port}" for port in range(9000, 9008))

    def __init__(self):
        self.client = Client(base_url=next(DrivingEnv.urls))

    def reset(self, **kwargs) -> list[dict]:
        self.client.reset()
        return self._camera("You drive towards a crossing.")

    def turn(self, lane: str) -> list[dict]:
        """
        Change the lane, and look through the camera.

        Args:
            lane: Either "left" or "right".

        Returns:
            What the camera sees.
        """
        if self.client.actions:
            raise ValueError("The episode is over.")
        return self._camera(self.client.step(lane)[0])

    def _camera(self, text: str) -> list[dict]:
        shade = 40 * len(self.client.actions)
        return [{"type": "image", "image": Image.new("RGB", (32, 32), (shade, 0, 0))}, {"type": "text", "text": text}]

    def get_reward(self) -> float:
        return 1.0 if self.client.actions == ["left"] else 0.0
