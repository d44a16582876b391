"""The `callboard` command: parses the command line and hands over to one module per command.

Commands are imported when they run, so `callboard --version` and help stay fast.
"""

import argparse
import sys
from importlib.metadata import version

from server.cli_arguments import add_other_commands
from server.cli_cache import add_cache_commands
from server.cli_keys import add_keys_options
from server.other_flags import add_other_flags
from server.settings import add_options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callboard",
        description="A server for language models on MLX that keeps hundreds of concurrent streams fast and alive.",
    )
    parser.add_argument("--version", action="version", version=f"callboard {version('callboard')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP and ZeroMQ")
    serve.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="a local folder, a hub id such as mlx-community/Qwen3-4B-4bit, or `demo`; several are loaded as they are "
        "asked for, and may be written NAME=MODEL",
    )
    add_options(serve)
    add_other_flags(serve)

    demo = commands.add_parser("demo", help="the same as `serve demo`: a small model that really talks")
    demo.set_defaults(models=["demo"])
    add_options(demo)

    chat = commands.add_parser("chat", help="chat in the terminal with a running server, or start one")
    chat.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="which model of the running server (its first), or what to serve when none runs (demo)",
    )
    chat.add_argument("--name", help="name of the running server to talk to")
    chat.add_argument("--system", help="system message to begin with")
    chat.add_argument("--temperature", type=float, help="sampling temperature (default: the model's)")
    chat.add_argument("--max-tokens", type=int, help="longest answer, in tokens")

    add_cache_commands(commands.add_parser("cache", help="look at, check and clear the prefix cache on the SSD"))
    keys = commands.add_parser("keys", help="make the keys for ZeroMQ over tcp, and let in further clients")
    add_keys_options(keys)
    restart = commands.add_parser("restart-engine", help="replace the engine of a running server; no stream is lost")
    restart.add_argument("model", metavar="MODEL", nargs="?", help="with several models, whose engine (default: all)")
    restart.add_argument("--name", help="name of the running server (default: the only one)")
    add_other_commands(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    match args.command:
        case "serve" | "demo":
            args.models += getattr(args, "named_models", [])  # `--model`, as mlx_lm.server has it
            from server.cli_serve import serve

            return serve(args)
        case "chat":
            from server.cli_chat import chat

            return chat(args)
        case "cache":
            from server.cli_cache import cache

            return cache(args)
        case "keys":
            from server.cli_keys import make_keys

            return make_keys(args)
        case "restart-engine":
            from server.cli_restart import restart_engine

            return restart_engine(args)
        case "ps":
            from server.cli_servers import ps

            return ps()
        case "stop":
            from server.cli_servers import stop

            return stop(args)
        case "load" | "unload" | "pin" | "unpin":
            from server.cli_held import order_model

            return order_model(args)
        case "top":
            from server.cli_top import top

            return top(args)
        case "ls":
            from server.cli_models import ls

            return ls()
        case "pull":
            from server.cli_models import pull

            return pull(args.model)
        case "rm":
            from server.cli_models import rm

            return rm(args.model, yes=args.yes)
        case "doctor":
            from server.cli_doctor import doctor

            return doctor(args)
        case "bench":
            from server.cli_bench import bench

            return bench(args)
    from server.cli_completion import completion

    return completion(parser, args.shell)


if __name__ == "__main__":
    sys.exit(main())
