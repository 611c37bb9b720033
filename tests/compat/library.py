"""What a bot written with discord.py 2 does, through the proxy at NIRN_API. Any surprise ends it with a traceback."""

import asyncio
import io
import os

import aiohttp
import discord

API = os.environ["NIRN_API"]
HASTY_API = os.environ["NIRN_HASTY_API"]
TOKEN = os.environ["NIRN_TOKEN"]
WRONG_TOKEN = os.environ["NIRN_WRONG_TOKEN"]
INTERACTION_TOKEN = os.environ["NIRN_INTERACTION_TOKEN"]
GUILD, CHANNEL, MEMBER, WEBHOOK = 200000000000000001, 100000000000000011, 300000000000000011, 500000000000000011
WEBHOOK_TOKEN = "another-webhook-token_of-sixty-eight-characters-0123456789abcdefghij"
REASON = "naïve Gründe – 理由 👍"
KEYCAP = "1\ufe0f\u20e3"


class Answers:
    """Notes every answer's status, and whether the proxy made it."""

    def __init__(self):
        self.seen = []
        self.trace = aiohttp.TraceConfig()
        self.trace.on_request_end.append(self.note)

    async def note(self, _session, _context, params):
        self.seen.append((params.response.status, "generated-by-proxy" in params.response.headers))


def client(answers=None):
    intents = discord.Intents.default()
    intents.members = True
    return discord.Client(intents=intents, http_trace=answers and answers.trace)


async def messages(bot, channel):
    message = await channel.send("hello, wörld")
    assert message.content == "hello, wörld", message.content
    assert (await message.edit(content="edited")).content == "edited"
    await message.add_reaction("👍")
    await message.add_reaction(KEYCAP)
    await message.remove_reaction("👍", bot.user)
    await message.delete()

    files = [
        discord.File(io.BytesIO(b"text\r\n--not a boundary\r\n"), "small.txt"),
        discord.File(io.BytesIO(bytes([7]) * 3_000_000), "größer.bin"),
    ]
    upload = await channel.send("files", files=files)
    assert [file.size for file in upload.attachments] == [24, 3_000_000], upload.attachments


async def guild_and_errors(bot, channel):
    guild = await bot.fetch_guild(GUILD)
    assert (await guild.fetch_member(MEMBER)).id == MEMBER
    members = [member async for member in guild.fetch_members(limit=2)]
    assert members
    await channel.edit(slowmode_delay=5, reason=REASON)

    try:
        await channel.fetch_message(100000000000000404)
        raise AssertionError("an unknown message was found")
    except discord.NotFound as error:
        assert (error.status, error.code) == (404, 10008), error
    try:
        async for _ in guild.bans(limit=1):
            pass
        raise AssertionError("bans were shown without permission")
    except discord.Forbidden as error:
        assert (error.status, error.code) == (403, 50013), error


async def webhook_and_interaction(bot):
    async with aiohttp.ClientSession() as session:
        webhook = discord.Webhook.partial(WEBHOOK, WEBHOOK_TOKEN, session=session)
        executed = await webhook.send("from a webhook", username="Captain", wait=True)
        assert executed.content == "from a webhook"

    interaction = discord.Interaction(
        data={
            "id": "600000000000000011",
            "application_id": str(bot.user.id),
            "type": 2,
            "token": INTERACTION_TOKEN,
            "version": 1,
            "attachment_size_limit": 10_485_760,
            "user": {"id": str(MEMBER), "username": "someone", "discriminator": "0", "avatar": None},
            "data": {"id": "700000000000000011", "name": "ping", "type": 1},
        },
        state=bot._connection,
    )
    await interaction.response.send_message("pong")
    assert (await interaction.followup.send("and more", wait=True)).content == "and more"
    assert (await interaction.edit_original_response(content="pong!")).content == "pong!"
    await interaction.delete_original_response()


async def wrong_token():
    """Discord judges a token once; from then on the proxy does. A library cannot tell one from the other."""
    for made_by_proxy in (False, True):
        answers = Answers()
        bot = client(answers)
        try:
            await bot.login(WRONG_TOKEN)
            raise AssertionError("a wrong token logged in")
        except discord.LoginFailure:
            assert answers.seen == [(401, made_by_proxy)], answers.seen
        finally:
            await bot.close()


async def proxy_made_429():
    """One client empties a bucket that the other knows nothing of, and the proxy has no time to wait for it."""
    discord.http.Route.BASE = f"{HASTY_API}/v10"
    answers = [Answers(), Answers()]
    bots = [client(each) for each in answers]
    for bot in bots:
        await bot.login(TOKEN)
    # Side by side, since this library returns from an exhausted bucket only when it is full again.
    await asyncio.gather(*(bot.http.send_typing(CHANNEL) for bot in bots))
    for bot in bots:
        await bot.close()
    seen = sorted([answer for answer in each.seen if answer[0] in (204, 429)] for each in answers)
    assert seen[0] == [(204, False)], seen
    assert (429, True) in seen[1] and seen[1][-1] == (204, False), seen


async def main():
    # Everything the library does over HTTP starts from here, webhooks and interactions included.
    discord.http.Route.BASE = f"{API}/v10"
    bot = client()
    await bot.login(TOKEN)
    channel = await bot.fetch_channel(CHANNEL)
    await messages(bot, channel)
    await guild_and_errors(bot, channel)
    await webhook_and_interaction(bot)
    await bot.close()
    await wrong_token()
    await proxy_made_429()
    print("discord.py is content")


asyncio.run(main())
