package main

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// commandLine is what kong fills in: the settings, which all commands share, and the commands.
type commandLine struct {
	Config

	Run         runCommand         `cmd:"" default:"1" help:"Publish events until told to stop (the default)."`
	Migrate     migrateCommand     `cmd:"" help:"Create or upgrade the outbox in the database, say what was done, and end."`
	Status      statusCommand      `cmd:"" help:"Show how the outbox is: backlog, relays, rates, what is held back."`
	Pause       pauseCommand       `cmd:"" help:"Make all relays stop to publish, and wait until they have."`
	Resume      resumeCommand      `cmd:"" help:"Let the relays publish again."`
	Doctor      doctorCommand      `cmd:"" help:"Check the whole installation, and say what is wrong and how to mend it."`
	Healthcheck healthcheckCommand `cmd:"" help:"Ask the relay in this container whether it lives; for HEALTHCHECK."`
	Replay      replayCommand      `cmd:"" help:"Send published events again: to a new consumer, or after a queue was lost."`
	DeadLetters deadLettersCommand `cmd:"" name:"dead-letters" help:"Look at events that were given up, and decide what becomes of them."`
	Version     versionCommand     `cmd:"" help:"Print the version and end."`
}

const description = `Publishes the events of a transactional outbox in PostgreSQL to RabbitMQ.

Every setting is a flag or the environment variable named beside it; the flag wins. An empty variable counts as unset, except where empty has a meaning.`

// parseConfig reads command and settings from the arguments and the environment ("NAME=value").
// The values are read but not yet checked, see validate; faults are those that could not even be
// read. An err is about the command line as such. With -h the help goes to stdout and the command
// is nil.
func parseConfig(args, environ []string, stdout io.Writer) (cmd command, cfg Config, faults []fault, err error) {
	var line commandLine
	helped := false
	parser, err := kong.New(&line,
		kong.Name("outbox-relay"),
		kong.Description(description),
		kong.Writers(stdout, io.Discard),
		kong.Exit(func(int) { helped = true }),
		kong.Help(helpOfCommand),
		kong.ValueFormatter(helpText),
		kong.Resolvers(environment(environ)),
		kong.TypeMapper(reflect.TypeFor[time.Duration](), lenient{&faults, setDuration}),
		kong.TypeMapper(reflect.TypeFor[eventID](), lenient{&faults, setEventID}),
		kong.TypeMapper(reflect.TypeFor[term](), lenient{&faults, setTerm}),
		kong.TypeMapper(reflect.TypeFor[moment](), lenient{&faults, setMoment}),
		kong.KindMapper(reflect.Int, lenient{&faults, setInt}),
		kong.KindMapper(reflect.Int64, lenient{&faults, setInt}),
		kong.KindMapper(reflect.Bool, lenientBool{lenient{&faults, setBool}}),
	)
	if err != nil {
		return nil, Config{}, nil, fmt.Errorf("command line: %w", err)
	}
	for _, f := range parser.Model.Flags {
		// kong would read the environment of the process and stop at the first fault. The
		// resolver and validate do these instead.
		f.Tag.Envs = nil
		f.Enum, f.Tag.Enum = "", ""
	}
	ctx, err := parser.Parse(args)
	if helped {
		return nil, Config{}, nil, nil
	}
	if err != nil {
		return nil, Config{}, nil, usageError(err)
	}
	return commandOf(ctx.Selected()), line.Config, faults, nil
}

// commandOf returns the command that a node of the command line stands for.
func commandOf(node *kong.Node) command {
	return node.Target.Addr().Interface().(command)
}

// helpOfCommand prints the help of the selected command, without the settings it does not use.
func helpOfCommand(options kong.HelpOptions, ctx *kong.Context) error {
	if node := ctx.Selected(); node != nil {
		for _, f := range ctx.Model.Flags {
			f.Hidden = f.Hidden || len(f.Envs) > 0 && !usedBy(node, f.Envs[0])
		}
	}
	return kong.DefaultHelpPrinter(options, ctx)
}

// usedBy reports whether a command, or one of a group of commands, looks at a setting.
func usedBy(node *kong.Node, setting string) bool {
	if len(node.Children) == 0 {
		return commandOf(node).uses(setting)
	}
	return slices.ContainsFunc(node.Children, func(child *kong.Node) bool { return usedBy(child, setting) })
}

// usage matches what kong's errors say without quoting an argument, which may hold a password.
var usage = regexp.MustCompile(`^unknown flag -{1,2}[a-z.-]+(, did you mean .*)?$|^--[a-z.-]+: expected [a-z]+ value|` +
	`^missing flags: [a-z=, -]+$|^expected ("<[a-z-]+>( \.\.\.)?"|one of ("[a-z-]+",? *)+)|^unexpected argument`)

func usageError(err error) error {
	if known := usage.FindString(err.Error()); known != "" {
		return fmt.Errorf("command line: %s, see -h", known)
	}
	return errors.New("command line: not understood, see -h")
}

// environment resolves a flag by its variable, unless the same setting was given as a flag in its other form: as
// a value or as a file that holds it.
func environment(environ []string) kong.ResolverFunc {
	values := environMap(environ)
	return func(ctx *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
		if len(flag.Envs) == 0 {
			return nil, nil
		}
		for _, p := range ctx.Path {
			if p.Flag != nil && !p.Resolved && (p.Flag.Name == flag.Name+"-file" || p.Flag.Name+"-file" == flag.Name) {
				return nil, nil
			}
		}
		v, ok := values[flag.Envs[0]]
		if !ok || v == "" && flag.Tag.Get("empty") != "value" {
			return nil, nil
		}
		return v, nil
	}
}

func environMap(environ []string) map[string]string {
	values := make(map[string]string)
	for _, e := range environ {
		if name, value, ok := strings.Cut(e, "="); ok {
			values[name] = value
		}
	}
	return values
}

// helpText shows the bounds and the variable after the help.
func helpText(v *kong.Value) string {
	if v.Flag == nil || len(v.Flag.Envs) == 0 {
		return v.Help
	}
	return fmt.Sprintf("%s ($%s)", helpOf(v.Tag.Get), v.Flag.Envs[0])
}

// helpOf is the help of a setting with its bounds, by its tags.
func helpOf(tag func(key string) string) string {
	help := tag("help")
	if least := tag("min"); least != "" {
		help += fmt.Sprintf(" From %s to %s.", least, tag("max"))
	}
	return help
}

// lenient is a kong mapper for one kind of value. What does not fit becomes a fault instead of an
// error, so that kong goes on and the next fault is found as well.
type lenient struct {
	faults *[]fault
	set    func(target reflect.Value, text string) (wanted string) // empty when text fits
}

// Decode implements kong.Mapper.
func (l lenient) Decode(ctx *kong.DecodeContext, target reflect.Value) error {
	token, err := ctx.Scan.PopValue("value")
	if err != nil {
		return err
	}
	text := fmt.Sprint(token.Value)
	if wanted := l.set(target, text); wanted != "" {
		name := "<" + ctx.Value.Name + ">"
		if f := ctx.Value.Flag; f != nil {
			name = "--" + f.Name
			if len(f.Envs) > 0 {
				name = f.Envs[0]
			}
		}
		*l.faults = append(*l.faults, fault{name, fmt.Sprintf("%q is not %s", text, wanted)})
	}
	return nil
}

// lenientBool is a lenient whose flag needs no value: --flag means true.
type lenientBool struct{ lenient }

// IsBool implements kong.BoolMapper.
func (lenientBool) IsBool() bool { return true }

// Decode implements kong.Mapper.
func (l lenientBool) Decode(ctx *kong.DecodeContext, target reflect.Value) error {
	if ctx.Scan.Peek().Type != kong.FlagValueToken {
		target.SetBool(true)
		return nil
	}
	return l.lenient.Decode(ctx, target)
}

func setDuration(target reflect.Value, text string) (wanted string) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return "a duration like 500ms, 5s or 1m30s"
	}
	target.SetInt(int64(d))
	return ""
}

func setInt(target reflect.Value, text string) (wanted string) {
	n, err := strconv.ParseInt(text, 10, target.Type().Bits())
	if err != nil {
		return "a whole number"
	}
	target.SetInt(n)
	return ""
}

func setBool(target reflect.Value, text string) (wanted string) {
	switch strings.ToLower(text) {
	case "true", "1", "yes", "on":
		target.SetBool(true)
	case "false", "0", "no", "off":
		target.SetBool(false)
	default:
		return "true or false"
	}
	return ""
}
