"""Record an episode whose answers a test gives as text, and show which of its tokens are in a loss."""

from producer.environments.chat import ChatTemplate
from producer.environments.recorder import ConversationTree
from tests.unit.producer.chat_families import completion, family_tokenizer
from tests.unit.producer.random_episodes import check_group

QUESTION = {"role": "user", "content": "Q"}


def said(text):
    return {"role": "assistant", "content": text}


class Talk:
    """An episode whose answers are given as text; `tree`, `template`, and the last node."""

    def __init__(self, family="qwen3", *, prompt_ids=None, opening=(QUESTION,)):
        self.template = ChatTemplate(family_tokenizer(family))
        self.tree = ConversationTree(self.template, episode=0, prompt_ids=prompt_ids)
        self.prompt = self.template.prompt(opening)
        self.node = self.tree.start(self.prompt, opening)

    def answer(self, text, *, context=None, message=None, finish_reason="stop"):
        """Answer in a context, or right after the last node; the message is the text without special tokens."""
        ids = self.template.encode(text)
        plain = self.template._tokenizer.decode(ids, skip_special_tokens=True)
        self.node = self.tree.add(
            context or self.tree.extend(self.node),
            completion(ids, finish_reason=finish_reason, text=plain),
            temperature=0.5,
            message=message or said(plain),
        )
        return self.node

    def pieces(self):
        """Of each trajectory, its text in pieces, those in the loss in brackets; a bar is the end of the prefix."""
        group = check_group(self.tree.trajectories(), self.prompt)
        return [self._marked(trajectory) for trajectory in group.trajectories]

    def _marked(self, trajectory):
        ids, mask = trajectory.token_ids.tolist(), [False, *trajectory.loss_mask.tolist(), False]
        marked, start = "", 0
        for place in range(1, len(ids) + 1):
            if place == len(ids) or mask[place + 1] != mask[place] or place == trajectory.prefix.num_tokens:
                text = self.template.decode(ids[start:place])
                marked += f"[{text}]" if mask[place] else text
                marked += "|" if place == trajectory.prefix.num_tokens else ""
                start = place
        return marked
