"""One of several processes of a bot: 100 messages at once, each to a channel of its own, then 4 to a channel all share."""

import asyncio
import os
import sys

import discord
from discord.http import handle_message_parameters

PROCESS = int(os.environ["NIRN_PROCESS"])


async def main():
    discord.http.Route.BASE = f"{os.environ['NIRN_API']}/v10"
    bot = discord.Client(intents=discord.Intents.none())
    await bot.login(os.environ["NIRN_TOKEN"])

    async def send(channel, content):
        with handle_message_parameters(content=content) as params:
            await bot.http.send_message(channel, params=params)

    # Until all of the bot's processes have started.
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)

    await asyncio.gather(*(send(210000000000000000 + PROCESS * 1000 + index, "to my own") for index in range(100)))
    await asyncio.gather(*(send(220000000000000000, "to all of us") for _ in range(4)))
    await bot.close()
    print("sent")


asyncio.run(main())
