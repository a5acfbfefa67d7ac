"""Hardpoint as a model of lm-eval (EleutherAI's harness), registered there as `hardpoint` when this module is imported.

`python -m hardpoint.compat.lm_eval run --model hardpoint --model_args pretrained=demo --tasks ...` is its command with this model known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from hardpoint import LLM, RequestOutput, SamplingParams
from hardpoint.engine.outputs import FlatLogprobs
from hardpoint.interfaces.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_AT_ONCE = 1024
"""Requests that the engine has at one time: far more than a step computes, and few enough to hold their results."""

Scored = tuple[float, bool]
"""Sum of the log probabilities of a continuation's tokens, and whether each of them is the most probable one."""


@register_model("hardpoint")
class HardpointLM(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods and texts of a model that Hardpoint runs, by the rules of lm-eval's own `hf` model.

    A continuation is scored with the context's blocks from the prefix cache. What does not fit `max_model_len` loses its beginning: of a
    text that is scored, all but the last token are the model's input, so that one of `max_model_len` tokens fits.

    Args:
        pretrained: the model, as for `LLM`.
        batch_size, max_batch_size: have no effect: the engine makes its own batches (`max_num_seqs`, `max_num_batched_tokens`).
        device: None; the backend is chosen by `backend`. One that lm-eval's command gives, which it does unasked, is not passed on.
        max_gen_toks: most new tokens where a task does not say.
        add_bos_token: put the tokenizer's special tokens before a text; None for the tokenizer's own way.
        prefix_token_id: what a text without a context follows; None for the beginning-of-text token, or else the end-of-text token.
        think_end_token: the text up to it is left out of what was generated.
        enable_thinking, chat_template_args: variables of the chat template.
        settings: of `EngineConfig`.

    Raises:
        ConfigError: a setting is not known, or `device` is given, or the model has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            raise ConfigError(
                "the model 'hardpoint' takes no device",
                found=f"device={device!r}",
                hint="Leave it out, or choose with backend=NAME; `hardpoint doctor` lists what is there",
            )
        self.llm = LLM(str(pretrained), **settings)
        tokenizer = self.llm.get_tokenizer()
        if tokenizer is None:
            self.llm.shutdown()
            raise ConfigError("lm-eval needs the model's tokenizer", found="skip_tokenizer_init", hint="Leave it out")
        self.tokenizer: Any = tokenizer
        self.max_gen_toks = max_gen_toks
        self._add_bos_token, self._think_end_token = add_bos_token, think_end_token
        self._prefix_token_id = prefix_token_id
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template_variables = dict(chat_template_args or {}) | thinking

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> HardpointLM:
        """Make the model for lm-eval's command, without the device that it names to every model."""
        return cls(**arg_dict, **_without_device(additional_config))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HardpointLM:
        """See `create_from_arg_obj`."""
        return cls(**simple_parse_args_string(arg_string), **_without_device(additional_config))

    # What lm-eval asks of a model

    @property
    def max_length(self) -> int:
        """Tokens of the context."""
        return self.llm.info.max_model_len

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """By which lm-eval knows requests again that it wrote down."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's token ids; without special tokens where the text begins with one itself."""
        if add_special_tokens is None:
            is_begun = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if is_begun else self._add_bos_token
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **how))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's chat template writes it; a template that refuses system messages is given none."""

        def written(messages: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self._template_variables,
                )
            )

        try:
            return written(chat_history)
        except jinja2.exceptions.TemplateError:
            return written([message for message in chat_history if message["role"] != "system"])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood, in windows of the context where it is longer."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            found = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 1, context_len=1
            )
            of_text = [(None, *make_disjoint_window(window)) for window in found]
            windows += of_text
            counts.append(len(of_text))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            total = sum(next(scores)[0] for _ in range(count))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model goes on with after each context, up to the first stop text."""
        prompts, params = [], []
        for request in requests:
            context, asked = request.args
            kwargs: dict[str, Any] = normalize_gen_kwargs(asked, self.max_gen_toks)
            new_tokens = kwargs.pop("max_gen_toks")
            room = self.max_length - new_tokens
            if room < 1:
                raise InvalidRequest(
                    "max_gen_toks must be less than max_model_len",
                    found=f"max_gen_toks={new_tokens}, with a context of {self.max_length}",
                    hint="Lower max_gen_toks, or raise max_model_len",
                )
            if not kwargs.pop("do_sample"):
                kwargs["temperature"] = 0.0
            stop = [text for text in kwargs.pop("until") if text]
            prompts.append(self.tok_encode(context)[-room:])
            params.append(SamplingParams(max_tokens=new_tokens, stop=stop, **kwargs))
        texts = []
        for request, one, output in zip(requests, params, self._run(prompts, params, disable_tqdm), strict=True):
            text = postprocess_generated_text(output.outputs[0].text, list(one.stop_texts), self._think_end_token)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[Scored]:
        """Return the score of each (texts, context tokens, continuation tokens).

        The continuation's last token is no input: its log probability is that of the one token that may be sampled.
        """
        prompts, params = [], []
        for _, context, continuation in requests:
            if not continuation:
                raise InvalidRequest("a continuation has no tokens", hint="Give a text to score")
            if len(continuation) >= self.max_length:
                raise InvalidRequest(
                    "a continuation does not fit the context",
                    found=f"{len(continuation)} tokens, with a context of {self.max_length}",
                    hint="Raise max_model_len",
                )
            *prompt, last = (context + continuation)[-self.max_length :]
            prompts.append(prompt)
            of_prompt = len(continuation) - 1
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=1,
                    ignore_eos=True,
                    allowed_token_ids=[last],
                    logprobs=1,
                    prompt_logprobs=1 if of_prompt else None,
                    prompt_logprobs_start=len(prompt) - of_prompt if of_prompt else 0,
                    flat_logprobs=True,
                    detokenize=False,
                )
            )
        scores = []
        for (texts, _, continuation), output in zip(requests, self._run(prompts, params, disable_tqdm), strict=True):
            score = _score(output, len(continuation))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
            scores.append(score)
        return scores

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool
    ) -> Iterable[RequestOutput]:
        for first in range(0, len(prompts), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            yield from self.llm.generate(prompts[some], params[some], use_tqdm=not disable_tqdm)


def _without_device(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (given or {}).items() if value is not None and name != "device"}


def _score(output: RequestOutput, num_tokens: int) -> Scored:
    """Return the score of the last tokens of a prompt together with the one that follows it."""
    found = output.outputs[0].logprobs
    assert isinstance(found, FlatLogprobs)
    of_tokens = found[:]
    if num_tokens > 1:
        of_prompt = output.prompt_logprobs
        assert isinstance(of_prompt, FlatLogprobs)
        of_tokens.extend(of_prompt[len(of_prompt) - num_tokens + 1 :])
    # A position has its own token first, and another one only where that is more probable.
    total = sum(of_tokens.logprobs[start] for start in of_tokens.start_indices)
    return total, len(of_tokens.token_ids) == num_tokens


if __name__ == "__main__":
    cli_evaluate()
