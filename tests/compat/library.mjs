// What a bot written with discord.js 14 does, through the proxy at NIRN_API. Any surprise ends it with a stack trace.
import assert from 'node:assert/strict';
import { DiscordAPIError, REST, RESTEvents, makeURLSearchParams } from '@discordjs/rest';
import * as discord from 'discord.js';

const { NIRN_API, NIRN_HASTY_API, NIRN_TOKEN, NIRN_WRONG_TOKEN, NIRN_INTERACTION_TOKEN } = process.env;
const guildId = '200000000000000001';
const channelId = '100000000000000001';
const unknownMessageId = '100000000000000404';
const memberId = '300000000000000001';
const webhook = { id: '500000000000000001', token: 'a-webhook-token_of-sixty-eight-characters-0123456789abcdefghijklmnopqr' };
const keycap = '1\u{fe0f}\u{20e3}';
const reason = 'naïve Gründe – 理由 👍';

// What a slow queue at the proxy may take, and a little more: the library gives up after 15 s otherwise.
const options = { api: NIRN_API, timeout: 65_000 };

async function restClient() {
  const rest = new REST({ version: '10', ...options }).setToken(NIRN_TOKEN);

  const me = await rest.get(discord.Routes.user('@me'));
  assert.equal(typeof me.id, 'string');

  const sent = await rest.post(discord.Routes.channelMessages(channelId), { body: { content: 'hello, wörld' } });
  assert.equal(sent.content, 'hello, wörld');
  const edited = await rest.patch(discord.Routes.channelMessage(channelId, sent.id), { body: { content: 'edited' } });
  assert.equal(edited.content, 'edited');
  for (const emoji of ['👍', keycap]) {
    await rest.put(discord.Routes.channelMessageOwnReaction(channelId, sent.id, encodeURIComponent(emoji)));
  }
  await rest.delete(discord.Routes.channelMessage(channelId, sent.id), { reason });

  const files = [
    { name: 'small.txt', data: Buffer.from('text\r\n--not a boundary\r\n') },
    { name: 'größer.bin', data: Buffer.alloc(3_000_000, 7) },
  ];
  const upload = await rest.post(discord.Routes.channelMessages(channelId), { body: { content: 'files' }, files });
  assert.deepEqual(upload.attachments.map((file) => file.size), [24, 3_000_000]);

  const query = makeURLSearchParams({ limit: 2, after: '0' });
  const members = await rest.get(discord.Routes.guildMembers(guildId), { query });
  assert.ok(members.length >= 1 && members.every((member) => typeof member.user.id === 'string'));

  await assert.rejects(rest.get(discord.Routes.channelMessage(channelId, unknownMessageId)), (error) => {
    assert.ok(error instanceof DiscordAPIError, `${error}`);
    assert.deepEqual([error.status, error.code, error.message], [404, 10008, 'Unknown Message']);
    return true;
  });
  await assert.rejects(rest.get(discord.Routes.guildBans(guildId)), (error) => {
    assert.ok(error instanceof DiscordAPIError, `${error}`);
    assert.deepEqual([error.status, error.code], [403, 50013]);
    return true;
  });
}

// Discord judges a token once; from then on the proxy does. A library cannot tell one from the other.
async function wrongToken() {
  for (const expected of [null, 'true']) {
    const rest = new REST({ version: '10', ...options }).setToken(NIRN_WRONG_TOKEN);
    let made;
    rest.on(RESTEvents.Response, (_, response) => (made = response.headers.get('generated-by-proxy')));
    await assert.rejects(rest.get(discord.Routes.user('@me')), (error) => {
      assert.ok(error instanceof DiscordAPIError, `${error}`);
      assert.deepEqual([error.status, error.code, error.message], [401, 0, '401: Unauthorized']);
      return true;
    });
    assert.equal(made, expected);
  }
}

// Two processes' worth of limiters: the second knows nothing of the bucket that the first emptied, and the proxy in front
// has no time to wait, so it says how long in Discord's words.
async function proxyMade429() {
  const statuses = [];
  for (let process = 0; process < 2; process += 1) {
    const rest = new REST({ version: '10', ...options, api: NIRN_HASTY_API }).setToken(NIRN_TOKEN);
    rest.on(RESTEvents.Response, (_, response) => {
      statuses.push(response.status);
      if (response.status === 429) assert.equal(response.headers.get('generated-by-proxy'), 'true');
    });
    await rest.post(discord.Routes.channelTyping(channelId));
  }
  assert.equal(statuses[0], 204);
  assert.ok(statuses.includes(429), `${statuses}`);
  assert.equal(statuses.at(-1), 204);
}

function interactionPacket(user) {
  return {
    id: '600000000000000001',
    application_id: user.id,
    type: 2,
    token: NIRN_INTERACTION_TOKEN,
    version: 1,
    locale: 'en-GB',
    app_permissions: '0',
    attachment_size_limit: 10_485_760,
    entitlements: [],
    authorizing_integration_owners: {},
    user: { id: memberId, username: 'someone', discriminator: '0', avatar: null, global_name: null },
    data: { id: '700000000000000001', name: 'ping', type: 1 },
  };
}

async function wholeClient() {
  const client = new discord.Client({ intents: [discord.GatewayIntentBits.Guilds], rest: options });
  // The gateway does not go through the proxy: what it would bring is handed in below.
  client.ws.connect = () => client.rest.get(discord.Routes.gatewayBot());
  client.token = NIRN_TOKEN;
  await client.login(NIRN_TOKEN);
  client.user = new discord.ClientUser(client, await client.rest.get(discord.Routes.user('@me')));
  client.application = new discord.ClientApplication(client, { id: client.user.id });

  const guild = await client.guilds.fetch(guildId);
  const member = await guild.members.fetch(memberId);
  assert.equal(member.id, memberId);
  assert.ok((await guild.members.list({ limit: 2 })).size >= 1);
  const channel = await guild.channels.fetch(channelId);
  const message = await channel.send({
    content: 'two files',
    files: ['one', 'two'].map((name) => new discord.AttachmentBuilder(Buffer.alloc(100_000, name), { name: `${name}.bin` })),
  });
  assert.deepEqual([...message.attachments.values()].map((file) => file.size), [100_000, 100_000]);
  assert.equal((await message.edit('edited')).content, 'edited');
  await message.react('👍');
  await message.react(keycap);
  await message.delete();
  await channel.edit({ rateLimitPerUser: 5, reason });
  await assert.rejects(channel.messages.fetch(unknownMessageId), (error) => {
    assert.ok(error instanceof discord.DiscordAPIError, `${error}`);
    assert.deepEqual([error.status, error.code], [404, 10008]);
    return true;
  });

  const hook = new discord.WebhookClient(webhook, { rest: options });
  const executed = await hook.send({ content: 'from a webhook', username: 'Captain' });
  assert.equal(executed.content, 'from a webhook');

  const [interaction] = await new Promise((resolve) => {
    client.once(discord.Events.InteractionCreate, (...received) => resolve(received));
    client.actions.InteractionCreate.handle(interactionPacket(client.user));
  });
  await interaction.reply('pong');
  assert.equal((await interaction.followUp('and more')).content, 'and more');
  assert.equal((await interaction.editReply('pong!')).content, 'pong!');
  await interaction.deleteReply();
  await client.destroy();
}

await restClient();
await wrongToken();
await proxyMade429();
await wholeClient();
console.log('discord.js is content');
